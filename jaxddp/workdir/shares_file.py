"""`shares.json`: the sizes of the devices' slices that a run measured, so that a resumed run uses them again."""

import json
from dataclasses import dataclass
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.mesh import Topology
from jaxddp.recipe_file import RUN_ID
from jaxddp.shares import Shares

SHARES_FILE = "shares.json"


@dataclass(frozen=True)
class SharesFile:
    """The file of a run.

    Attributes:
        run_id: the id of the run.
        devices: the kind of each device, in mesh order, and the number of processes, as text.
    """

    directory: Path
    run_id: str
    devices: str

    @classmethod
    def of(cls, directory: Path, run_id: str, topology: Topology) -> "SharesFile":
        """Return the file of a run on the devices of a topology."""
        kinds = [device.device_kind for device in topology.mesh.devices.flat]
        return cls(directory, run_id, json.dumps([topology.process_count, kinds]))

    @property
    def path(self) -> Path:
        return self.directory / SHARES_FILE

    def read(self) -> tuple[str, str]:
        """Return the value of `parallel.shares` that the run measured, or "" and a reason to measure again."""
        if not self.path.exists():
            return "", "the run did not measure its devices"
        try:
            entries = files.parse_json(files.read(self.path))
            if entries[RUN_ID] != self.run_id:
                return "", f"{self.path} is of another run"
            if json.dumps([entries["processes"], entries["devices"]]) != self.devices:
                return "", "the devices have changed"
            processes, kinds = json.loads(self.devices)
            Shares.parse(entries["shares"]).of_devices(len(kinds), processes)
            return entries["shares"], ""
        except (OSError, InputError, ValueError, TypeError, KeyError, AttributeError):
            return "", f"{self.path} is damaged"

    def write(self, shares: str) -> None:
        """Write the file. Raises: InputError if this fails."""
        processes, kinds = json.loads(self.devices)
        content = {RUN_ID: self.run_id, "shares": shares, "processes": processes, "devices": kinds}
        files.replace(self.path, (json.dumps(content, indent=2) + "\n").encode())
