"""The formats of `STEP/manifest.json` and `manifests.json`; reading them checks their own SHA-256 and their fields."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.wording import show
from jaxddp.recipe_file import RUN_ID
from jaxddp.training.checkpoints.run_identity import RunIdentity

_SEAL = "sha256"


@dataclass(frozen=True)
class StepManifest:
    """The content of `STEP/manifest.json`.

    Attributes:
        files: the size in bytes and the SHA-256 of each file, by its path below the step's directory.
        run: the run of the checkpoint; None if unknown, as in older releases.
    """

    step: int
    files: dict[str, tuple[int, str]]
    run: RunIdentity | None = None

    @classmethod
    def parse(cls, data: bytes) -> "StepManifest":
        """Read the content of the file. Raises: ValueError if the content is invalid."""
        content = unsealed(data)
        step, entries, run = content.get("step"), content.get("files"), content.get("run")
        if type(step) is not int or not isinstance(entries, dict):
            raise ValueError(f"its step is {show(step)}, its files are {show(entries)}")
        files = {_path(name): _entry(name, entry) for name, entry in entries.items()}
        return cls(step, files, None if run is None else RunIdentity.parse(run))

    def encode(self) -> bytes:
        """Return the content of the file."""
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        run = {} if self.run is None else {"run": self.run.plain()}
        return sealed({"step": self.step, **run, "files": files})

    def differs(self, step: int, run: RunIdentity | None) -> str | None:
        """Return why the manifest is not of this step and run; None if it is. An unknown run is not compared."""
        if self.run is not None and run is not None and (other := self.run.differs(run)) is not None:
            return other
        return f"its manifest is of step {self.step}" if self.step != step else None


@dataclass
class Index:
    """The content of `manifests.json`.

    Attributes:
        steps: the SHA-256 of each step's manifest.
        validations: the SHA-256 of `validation.json`, and of its former content while it is being replaced.
        run_id: the id of the run of the checkpoints; None if unknown, as in older releases.
    """

    steps: dict[str, str] = field(default_factory=dict)
    validations: list[str] = field(default_factory=list)
    run_id: str | None = None

    @classmethod
    def parse(cls, data: bytes) -> "Index":
        """Read the content of the file. Raises: ValueError if the content is invalid."""
        content = unsealed(data)
        steps, validations, run_id = content.get("steps"), content.get("validations"), content.get(RUN_ID)
        if not isinstance(steps, dict) or not all(isinstance(digest, str) for digest in steps.values()):
            raise ValueError(f"its steps are {show(steps)}")
        if not isinstance(validations, list) or not all(isinstance(digest, str) for digest in validations):
            raise ValueError(f"its validations are {show(validations)}")
        if not isinstance(run_id, str | None):
            raise ValueError(f"its {RUN_ID} is {show(run_id)}")
        return cls(steps, validations, run_id)

    def encode(self) -> bytes:
        """Return the content of the file."""
        run = {} if self.run_id is None else {RUN_ID: self.run_id}
        return sealed({**run, "steps": self.steps, "validations": self.validations})


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def _path(name: str) -> str:
    """Return a file's path. Raises: ValueError if it is not a relative path below the step's directory."""
    path = PurePosixPath(name)
    os.fsencode(name)  # raises for a lone surrogate
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{show(name)} is not a path below the step's directory")
    return name


def _entry(name: str, entry: Any) -> tuple[int, str]:
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or not isinstance(digest, str):
        raise ValueError(f"its entry for {show(name)} is {show(entry)}")
    return size, digest


def sealed(content: dict[str, Any]) -> bytes:
    """Return content as JSON, with the SHA-256 of the content as a further entry."""
    seal = sha256(json.dumps(content).encode())
    return (json.dumps({**content, _SEAL: seal}, indent=1) + "\n").encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the content of `sealed` bytes. Raises: ValueError if the SHA-256 in them does not match the content."""
    try:
        content = files.parse_json(data)
        del content[_SEAL]
        if sealed(content) == data:
            return content
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError("its own SHA-256 does not match")
