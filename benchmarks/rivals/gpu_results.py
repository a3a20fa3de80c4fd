"""The table that `benchmarks/gpu.py` fills: a JSON file that is whole at every moment, and so outlives any kill."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Figures


class Refused(Exception):
    """What this benchmark was asked for cannot be done; its text is one line."""


@dataclass
class Table:
    """Measurements by their keys, such as "batches/torch/eager/256": figures, or why there are none ("failed").

    `about` says of what they are; all that one file holds are of the same.
    """

    path: Path
    about: dict[str, Any]
    measured: dict[str, Figures]

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any]) -> "Table":
        """The table in a file, or a new one. Raises: Refused; it is of something else, or no table."""
        if not path.exists():
            return cls(path, dict(about), {})
        try:
            content = json.loads(path.read_text())
            table = cls(path, content["about"], content["measured"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path}: no table of this benchmark ({error!r}); give another --out") from None
        for name, value in about.items():
            if table.about.setdefault(name, value) != value:
                raise Refused(f"{path}: its {name} is {table.about[name]}, and here {value}; give another --out")
        return table

    def put(self, key: str, figures: Figures) -> None:
        """Add a measurement, and write the file."""
        self.measured[key] = figures
        self.save()

    def forget(self, prefixes: Iterable[str]) -> None:
        """Leave out the measurements whose keys begin so, to be taken again."""
        chosen = tuple(prefixes)
        self.measured = {key: found for key, found in self.measured.items() if not key.startswith(chosen)}

    def save(self) -> None:
        """Write the file, beside the one there and then in its place."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.part")
        with unfinished.open("w") as file:
            file.write(json.dumps({"about": self.about, "measured": self.measured}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)

    def figures(self, key: str) -> Figures | None:
        """What was measured; None where nothing was, or where it failed."""
        found = self.measured.get(key)
        return None if found is None or "failed" in found else found

    def below(self, prefix: str) -> dict[str, Figures]:
        """The figures of keys that begin so, by the rest of the key; what failed is left out."""
        found = {key.removeprefix(prefix): self.figures(key) for key in self.measured if key.startswith(prefix)}
        return {key: figures for key, figures in found.items() if figures is not None}

    @property
    def failures(self) -> dict[str, str]:
        """Why there are no figures, by key."""
        return {key: found["failed"] for key, found in self.measured.items() if "failed" in found}
