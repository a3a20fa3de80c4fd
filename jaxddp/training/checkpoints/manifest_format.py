"""The two kinds of manifest as files: each is seen to be whole, and to hold what it should."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from jaxddp.core.wording import show
from jaxddp.recipe_file import RUN_ID
from jaxddp.training.checkpoints.run_identity import RunIdentity

_SEAL = "sha256"


@dataclass(frozen=True)
class Listing:
    """What `STEP/manifest.json` holds.

    Attributes:
        files: the size in bytes and the SHA-256 of each, by its path below the step's directory.
        run: whose checkpoint it is; None where nothing said so, as in older releases.
    """

    step: int
    files: dict[str, tuple[int, str]]
    run: RunIdentity | None = None

    @classmethod
    def parse(cls, data: bytes) -> "Listing":
        """The inverse of `encode`. Raises: ValueError; says what is wrong."""
        told = unsealed(data)
        step, entries, run = told.get("step"), told.get("files"), told.get("run")
        if type(step) is not int or not isinstance(entries, dict):
            raise ValueError(f"its step is {show(step)}, its files are {show(entries)}")
        files = {_path(name): _entry(name, entry) for name, entry in entries.items()}
        return cls(step, files, None if run is None else RunIdentity.parse(run))

    def encode(self) -> bytes:
        """As the file holds it."""
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        run = {} if self.run is None else {"run": self.run.plain()}
        return sealed({"step": self.step, **run, "files": files})

    def differs(self, step: int, run: RunIdentity | None) -> str | None:
        """What is wrong where it is found in a step's directory of a run; None where nothing is, as far as both say."""
        if self.run is not None and run is not None and (other := self.run.differs(run)) is not None:
            return other
        return f"its manifest is of step {self.step}" if self.step != step else None


@dataclass
class Index:
    """What `manifests.json` holds.

    Attributes:
        steps: the SHA-256 of each step's manifest.
        validations: the SHA-256 of `validation.json`, and of the one before where it is being replaced.
        run_id: of the run whose checkpoints they are; None as in a `Listing`.
    """

    steps: dict[str, str] = field(default_factory=dict)
    validations: list[str] = field(default_factory=list)
    run_id: str | None = None

    @classmethod
    def parse(cls, data: bytes) -> "Index":
        """The inverse of `encode`. Raises: ValueError; says what is wrong."""
        told = unsealed(data)
        steps, validations, run_id = told.get("steps"), told.get("validations"), told.get(RUN_ID)
        if not isinstance(steps, dict) or not all(isinstance(digest, str) for digest in steps.values()):
            raise ValueError(f"its steps are {show(steps)}")
        if not isinstance(validations, list) or not all(isinstance(digest, str) for digest in validations):
            raise ValueError(f"its validations are {show(validations)}")
        if not isinstance(run_id, str | None):
            raise ValueError(f"its {RUN_ID} is {show(run_id)}")
        return cls(steps, validations, run_id)

    def encode(self) -> bytes:
        """As the file holds it."""
        run = {} if self.run_id is None else {RUN_ID: self.run_id}
        return sealed({**run, "steps": self.steps, "validations": self.validations})


def sha256(data: bytes) -> str:
    """As hex."""
    return hashlib.sha256(data).hexdigest()


def _path(name: str) -> str:
    """A path below a directory. Raises: ValueError."""
    path = PurePosixPath(name)
    os.fsencode(name)  # which refuses half of a character
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{show(name)} is no path below it")
    return name


def _entry(name: str, entry: Any) -> tuple[int, str]:
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or not isinstance(digest, str):
        raise ValueError(f"of {show(name)} it says {show(entry)}")
    return size, digest


def sealed(content: dict[str, Any]) -> bytes:
    """Content as JSON that also holds the SHA-256 of the rest."""
    seal = sha256(json.dumps(content).encode())
    return (json.dumps({**content, _SEAL: seal}, indent=1) + "\n").encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """The content of sealed bytes. Raises: ValueError; a bit of them differs from what was written."""
    try:
        content = json.loads(data)
        del content[_SEAL]
        if sealed(content) == data:
            return content
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError("its own SHA-256 is another")
