"""The table of `benchmarks/gpu.py`: a JSON file that is complete at every moment, so that it survives a kill."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Figures


class Refused(Exception):
    """The benchmark rejects a request. The text is a reason of one line."""


@dataclass
class Table:
    """Measurements by key, such as "batches/torch/eager/256": figures, or the reason of a failure ("failed").

    `about` describes the device and the case, which all measurements of a file share.
    """

    path: Path
    about: dict[str, Any]
    measured: dict[str, Figures]

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any]) -> "Table":
        """Open a table, or a new one. Raises Refused if the file is no table or belongs to another device or case."""
        if not path.exists():
            return cls(path, dict(about), {})
        try:
            content = json.loads(path.read_text())
            table = cls(path, content["about"], content["measured"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path}: not a table of this benchmark ({error!r}); give another --out") from None
        for name, value in about.items():
            if table.about.setdefault(name, value) != value:
                raise Refused(f"{path}: its {name} is {table.about[name]}, not {value}; give another --out")
        return table

    def put(self, key: str, figures: Figures) -> None:
        """Add a measurement, and write the file."""
        self.measured[key] = figures
        self.save()

    def forget(self, prefixes: Iterable[str]) -> None:
        """Remove the measurements whose keys begin with a prefix, so that they are repeated."""
        chosen = tuple(prefixes)
        self.measured = {key: results for key, results in self.measured.items() if not key.startswith(chosen)}

    def save(self) -> None:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.part")
        with unfinished.open("w") as file:
            file.write(json.dumps({"about": self.about, "measured": self.measured}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)

    def figures(self, key: str) -> Figures | None:
        """Return the figures of a key, or None if it is missing or failed."""
        results = self.measured.get(key)
        return None if results is None or "failed" in results else results

    def below(self, prefix: str) -> dict[str, Figures]:
        """Return the figures of keys with a prefix, by the rest of the key, without failures."""
        results = {key.removeprefix(prefix): self.figures(key) for key in self.measured if key.startswith(prefix)}
        return {key: figures for key, figures in results.items() if figures is not None}

    @property
    def failures(self) -> dict[str, str]:
        """The reasons of failures, by key."""
        return {key: results["failed"] for key, results in self.measured.items() if "failed" in results}
