"""Verifies checkpoints by manifests, which hold the size and the SHA-256 of every file of a complete checkpoint.

The manifest of a step, `STEP/manifest.json`, also holds the step and the run, and is removed with the step. The index
beside the steps, `manifests.json`, holds the SHA-256 of every manifest and of `validation.json`, so a missing manifest
is detected as damage. Both files also hold a SHA-256 of their other content.

Orbax's own metadata cannot hold these hashes: `custom_metadata` is written before the files that would be hashed, and
the metadata of a directory of checkpoints is written once and never changed.

`validation.json` has the metrics of each validation of a run. The best checkpoint is chosen by them.
"""

import hashlib
import json
import logging
import math
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.config import LogConfig, ParallelConfig
from jaxddp.config.goal import Goal
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError
from jaxddp.core.phases import BYTES, doing, reached
from jaxddp.recipe.file import RUN_ID
from jaxddp.recipe.sources import CONFIG_FILE

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a work directory."""
MANIFEST, INDEX = "manifest.json", "manifests.json"
DAMAGED_SUFFIX = ".damaged"
"""The suffix that the directory of a damaged step is given."""
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's metadata file of a step; Orbax reads the metadata of all steps when it opens the directory."""
LOCATION_KEYS = ("data.path", "data.name", "data.train", "data.val", "data.images", "data.unlabelled")
"""The keys that name the data's location. They may change on resume, because moved data keep their fingerprint."""
LENGTH_KEYS = ("train.duration", "train.stop_after", "train.stop_min_gain")
LENGTH_KEYS += ("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing")
"""The keys that determine when a run ends. A run that has ended continues if one of them changes."""
MAY_CHANGE = frozenset({*LENGTH_KEYS, *LOCATION_KEYS, "train.accumulate", "train.max_bad_steps", "train.remat"})
MAY_CHANGE |= {"eval.every", "eval.batch_size", "eval.views", "checkpoint.every", "checkpoint.keep"}
MAY_CHANGE |= {f"log.{field.name}" for field in fields(LogConfig) if field.name != "gradient_norm"}
MAY_CHANGE |= {"recipe.file", "objects.jax", "objective.teacher", "model.offline", RUN_ID}
MAY_CHANGE |= {f"parallel.{field.name}" for field in fields(ParallelConfig) if field.name != "reproducible"}
MAY_CHANGE |= {"data.max_bad_images", "data.verify", "data.manifest"}
MAY_CHANGE |= {"data.local_cache", "data.data_dir", "data.workers"}
"""The keys that a resumed run may change: its length, cadences, devices, outputs and evaluation. All others belong to
the recipe. A teacher, like the data, is compared by its fingerprint."""
_REQUIRED_FILES = (METADATA, "progress/metadata", "state/_METADATA", "state/manifest.ocdbt")
"""The files of Orbax that every restore needs."""
_DAMAGES = (ValueError, KeyError, TypeError, AttributeError)
"""The errors of damaged JSON: content that cannot be parsed, lacks an entry or has other types."""
_SEAL = "sha256"
_THREADS = 4


@dataclass(frozen=True)
class RunIdentity:
    """The id of a run, and digests of its settings.

    Attributes:
        id: a random id, drawn when the run starts.
        keys: a digest of the names of the keys that are compared on resume, and of the JAX release that made the
            digests of Python objects in the config.
        values: a digest of the values of these keys. It is compared only if `keys` is equal, because a new release may
            have other keys.
    """

    id: str
    keys: str
    values: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunIdentity | None":
        """Return the identity in the content of a config.json; None if it has no id."""
        flat = flatten(dict(config))
        if not isinstance(run_id := flat.get(RUN_ID), str) or not run_id:
            return None
        compared = {key: _plain(value) for key, value in sorted(flat.items()) if key not in MAY_CHANGE}
        keys, values = [*compared, flat.get("objects.jax")], [*compared.values()]
        keys_digest, values_digest = (sha256(json.dumps(each).encode())[:16] for each in (keys, values))
        return cls(run_id, keys_digest, values_digest)

    @classmethod
    def in_workdir(cls, directory: Path) -> "RunIdentity | None":
        """Return the identity of a work directory's run; None if config.json names no run or is unreadable."""
        with suppress(OSError, ValueError):
            return cls.of(files.parse_json(files.read(directory / CONFIG_FILE), dict))
        return None

    def differs(self, config: "RunIdentity") -> str | None:
        """Return why a checkpoint of this run does not belong to the run of config.json; None if it does."""
        if self.id != config.id:
            return f"it belongs to run {self.id}, and {CONFIG_FILE} names run {config.id}; restore the right one"
        if self.keys == config.keys and self.values != config.values:
            return f"its settings differ from {CONFIG_FILE}, which has changed; restore them"
        return None


def _plain(value: Any) -> Any:
    """Return a value with whole floats replaced by integers, so that 1 and 1.0 have the same digest."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class StepManifest:
    """The content of `STEP/manifest.json`.

    Attributes:
        files: the size in bytes and the SHA-256 of each file, by its path below the step's directory.
        run: the run of the checkpoint; None if unknown.
    """

    step: int
    files: dict[str, tuple[int, str]]
    run: RunIdentity | None = None

    @classmethod
    def parse(cls, data: bytes) -> "StepManifest":
        """Read the content of the file. Raises: one of `_DAMAGES` if the content is invalid."""
        content = unsealed(data)
        listed = {name: (int(entry["bytes"]), entry["sha256"]) for name, entry in content["files"].items()}
        if any(name.startswith("/") or ".." in name.split("/") or not name.isprintable() for name in listed):
            raise ValueError("a file is not below the step's directory")
        run = content.get("run")
        return cls(int(content["step"]), listed, run and RunIdentity(**run))

    def encode(self) -> bytes:
        """Return the content of the file."""
        run = {"run": vars(self.run)} if self.run else {}
        listed = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        return sealed({"step": self.step, **run, "files": listed})

    def differs(self, step: int, run: RunIdentity | None) -> str | None:
        """Return why the manifest is not of this step and run; None if it is. An unknown run is not compared."""
        other = self.run.differs(run) if self.run and run else None
        of_another = f"its manifest is of step {self.step}" if self.step != step else None
        return other or of_another


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def sealed(content: dict[str, Any]) -> bytes:
    """Return content as JSON, with the SHA-256 of the content as a further entry."""
    return (json.dumps({**content, _SEAL: sha256(json.dumps(content).encode())}, indent=1) + "\n").encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the content of `sealed` bytes. Raises: ValueError if the SHA-256 in them does not match the content."""
    with suppress(ValueError):
        content = files.parse_json(data, dict)
        content.pop(_SEAL, None)
        if sealed(content) == data:
            return content
    raise ValueError("its own SHA-256 does not match")


class Integrity:
    """The manifests of a directory of checkpoints.

    Only one process writes. A file that cannot be read is treated as damaged. If a file cannot be written, InputError
    is raised.

    Args:
        workdir: the folder of config.json, which names the run. The default is the parent of `directory`. If
            `directory` was resolved from a link, give the parent of the link.

    Attributes:
        run: the run that the checkpoints must belong to, and which manifests name; at first that of config.json, None
            if config.json names no run.
        fault: the fault of the index; None if it has none.
    """

    def __init__(self, directory: Path, workdir: Path | None = None):
        self.directory = directory
        self.run = RunIdentity.in_workdir(workdir or directory.parent)
        self.fault: str | None = None
        # The SHA-256 of each step's manifest, and of `validation.json` (and its former content while it is replaced).
        self._manifests, self._validations = dict[str, str](), list[str]()
        self._run_id: str | None = None
        # A thread writes the manifest of a step while training goes on.
        self._lock = threading.Lock()
        self._read_index()

    def write(self, step: int) -> None:
        """Hash all files of a complete checkpoint, and write its manifest and the index."""
        folder = self.directory / str(step)
        with files.readable_errors(folder):
            digests = digests_of(folder, sorted(_names(folder)))
            hashed = {name: ((folder / name).stat().st_size, digest) for name, digest in digests}
        content = StepManifest(step, hashed, self.run).encode()
        files.replace(folder / MANIFEST, content)
        with self._lock:
            # Drop the steps that Orbax has removed.
            manifests, present = self._manifests | {str(step): sha256(content)}, map(str, steps_in(self.directory))
            self._manifests = {name: manifests[name] for name in present if name in manifests}
            self._write_index()

    def forget(self, step: int) -> None:
        """Remove the digest of an earlier checkpoint of a step that is about to be written."""
        with self._lock:
            removed = self._manifests.pop(str(step), None) is not None
            # Write the index before the first checkpoint: later, a missing index or the index of another run counts
            # as damage.
            if removed or self._run_id != (self.run and self.run.id) or not (self.directory / INDEX).exists():
                self._write_index()

    def needs_manifest(self, step: int) -> bool:
        """Return whether a step must have a manifest.

        A step has no manifest if the run was killed before the manifest was written.
        """
        expected = self.fault is not None or str(step) in self._manifests
        return expected or (self.directory / str(step) / MANIFEST).exists()

    def check(self, step: int, *, quick: bool = False) -> str | None:
        """Return the first fault of a checkpoint, beginning with the name of the file; None if there is none.

        Args:
            quick: compare names and sizes only.

        Raises:
            FileNotFoundError: the step has no directory.
            Unreachable: the file server does not answer, which is not damage.
        """
        folder = self.directory / str(step)
        if not folder.is_dir():
            raise FileNotFoundError(str(folder))
        try:
            if self.needs_manifest(step):
                return self._compare(folder, step, quick)
            return next((f"{name} is missing" for name in _REQUIRED_FILES if not (folder / name).is_file()), None)
        except OSError as error:
            files.check_server(folder, error)
            place, is_missing = Path(error.filename or folder), isinstance(error, FileNotFoundError)
            name = place.relative_to(folder) if place.is_relative_to(folder) else place
            return f"{name} is missing" if is_missing else f"{name} cannot be read ({error.strerror})"

    def _compare(self, folder: Path, step: int, quick: bool) -> str | None:
        content = files.read(folder / MANIFEST)
        try:
            manifest = StepManifest.parse(content)
        except _DAMAGES as error:
            return f"{MANIFEST} is damaged ({error})"
        if (other := manifest.differs(step, self.run)) is not None:
            return other
        if self._manifests.get(str(step), sha256(content)) != sha256(content):
            return f"{MANIFEST} is not the one that was written"
        for name, (size, _) in manifest.files.items():
            status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != size:
                return f"{name} has {status.st_size:,} bytes, and {size:,} were saved"
        if extra := sorted(_names(folder) - manifest.files.keys()):
            return f"{extra[0]} does not belong to it"
        if quick:
            return None
        hashed, total = 0, sum(size for size, _ in manifest.files.values())
        with doing(f"verifying step {step:,}", total, BYTES):
            for name, now in digests_of(folder, list(manifest.files)):
                size, was = manifest.files[name]
                if now != was:
                    return f"{name} does not hold what was saved"
                hashed += size
                reached(hashed)
        return None

    def expect_validations(self, content: bytes, present: bytes | None) -> None:
        """Accept new content of `validation.json`, which is about to be written, in addition to its present content."""
        with self._lock:
            self._write_index([sha256(one) for one in (content, present) if one is not None])

    def expects_validations(self) -> bool:
        """Whether the index lists a `validation.json`."""
        return bool(self._validations) and self.fault is None

    def fault_of_validations(self, content: bytes) -> str | None:
        """Return why the index rejects content of `validation.json`; None if the index lists this content, or none."""
        is_listed = sha256(content) in self._validations
        if self.fault is not None:
            return f"{INDEX}, which lists it, {self.fault}" if is_listed else None
        return None if is_listed or not self._validations else f"its SHA-256 is not that in {INDEX}"

    def _read_index(self) -> None:
        try:
            content = unsealed(files.read(self.directory / INDEX))
            manifests, self._validations = dict(content["steps"]), list(content["validations"])
            self._run_id = content.get(RUN_ID)
            if self.run is None or self._run_id in (None, self.run.id):
                self._manifests = manifests
            else:
                self.fault = f"is of run {self._run_id}, and {CONFIG_FILE} names run {self.run.id}"
        except FileNotFoundError:
            if any((self.directory / str(step) / MANIFEST).exists() for step in steps_in(self.directory)):
                self.fault = "is missing"
        except OSError as error:
            self.fault = f"cannot be read ({error.strerror})"
        except _DAMAGES as error:
            self.fault = f"is damaged ({error})"

    def _write_index(self, validations: list[str] | None = None) -> None:
        """Write the index, with these digests of `validation.json`; None keeps them."""
        if self.fault is not None:
            # Rebuild the index from the manifests that are undamaged.
            for step in steps_in(self.directory):
                with suppress(OSError, *_DAMAGES):
                    content = files.read(self.directory / str(step) / MANIFEST)
                    if StepManifest.parse(content).differs(step, self.run) is None:
                        self._manifests.setdefault(str(step), sha256(content))
            self.fault, self._validations = None, []
        self._validations = self._validations if validations is None else validations
        self._run_id = self.run and self.run.id
        run = {RUN_ID: self._run_id} if self._run_id else {}
        content = {**run, "steps": self._manifests, "validations": self._validations}
        files.replace(self.directory / INDEX, sealed(content))


def steps_in(directory: Path) -> list[int]:
    """Return all steps that have a directory, in order, also damaged steps."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and name == str(int(name)))


def _names(folder: Path) -> set[str]:
    """Return the relative paths of all files below a folder, without the manifest and without hidden files."""
    found = (path for path in folder.rglob("*") if not (path.name.startswith(".") or path.is_dir()))
    return {path.relative_to(folder).as_posix() for path in found} - {MANIFEST}


def digests_of(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 in hex of each file. Hashing releases Python's lock, so threads do it."""

    def digest(name: str) -> str:
        with files.open_regular(folder / name) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from zip(names, pool.map(digest, names), strict=True)


VALIDATION_FILE, _GOAL = "validation.json", "goal"
_ADVICE = "remove it; the best checkpoint is then unknown, so copy the best checkpoint first"
_log = logging.getLogger("jaxddp.training")

Metrics = dict[str, float | None]


class ValidationFile:
    """The `flat` metrics of each validated step, and the goal by which the run compares them.

    Args:
        integrity: holds the digest of the file. It is None on processes that only read the file (all but the first),
            because a network file system may show them an older version.
        goal: the goal of the run that writes the file; None takes the goal in the file, or the default goal.

    Attributes:
        by_step: the metrics of each validated step.

    Raises: InputError if the file cannot be read, or is damaged.
    """

    def __init__(self, directory: Path, integrity: Integrity | None, goal: Goal | None = None):
        self._path = directory / VALIDATION_FILE
        self._integrity = integrity
        self._content: bytes | None = None
        self.by_step, self._written_goal = self._read()
        self.goal = goal or self._written_goal

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, null for a value that is not finite. Raises: InputError if this fails."""
        self.by_step[step] = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write()

    def forget(self, step: int) -> None:
        """Remove the metrics of a step that is about to be saved again. Raises: InputError if this fails."""
        if self.by_step.pop(step, None) is not None:
            self._write()

    def resume(self, step: int) -> None:
        """Remove the metrics of the steps after `step`, where the run resumes (0 for a new run), and write the goal.

        Raises: InputError if the file cannot be written.
        """
        kept = {each: metrics for each, metrics in self.by_step.items() if each <= step}
        if len(kept) < len(self.by_step) or (kept and self.goal != self._written_goal):
            self.by_step = kept
            self._write()

    def best(self, steps: Iterable[int]) -> int | None:
        """Return the best of these steps; the latest if several are equal, None if none was validated."""
        goal, known = self.goal, sorted(self.by_step.items())
        measured = {step: value for step, metrics in known if (value := metrics.get(goal.metric)) is not None}
        values = dict(zip(measured, goal.values(measured.values()), strict=True))
        validated = [step for step in sorted(steps) if step in values]
        return validated[goal.best([values[step] for step in validated])] if validated else None

    def _write(self) -> None:
        if self._integrity is not None:
            goal = {} if self.goal == Goal() else {_GOAL: self.goal.plain()}
            content = json.dumps({**goal, **self.by_step}, indent=2).encode()
            self._integrity.expect_validations(content, self._content)
            files.replace(self._path, content)
            self._content, self._written_goal = content, self.goal

    def _read(self) -> tuple[dict[int, Metrics], Goal]:
        with files.reading(self._path, "make it readable"):
            if not self._path.exists():
                if self._integrity is not None and self._integrity.expects_validations():
                    _log.warning(f"{self._path}: is missing; the best of the earlier checkpoints is unknown")
                return {}, Goal()
            content = files.read(self._path)
        with files.parsing(self._path, _ADVICE):
            entries = files.parse_json(content, dict)
            goal = Goal.from_plain(entries.pop(_GOAL)) if _GOAL in entries else Goal()
            metrics_by_step = {int(name): dict(metrics) for name, metrics in entries.items()}
            values = (value for metrics in metrics_by_step.values() for value in metrics.values())
            if not all(value is None or math.isfinite(value) for value in values):
                raise ValueError("a value is not finite")
        if self._integrity is not None and (fault := self._integrity.fault_of_validations(content)) is not None:
            raise InputError(f"{self._path}: is damaged ({fault}); {_ADVICE}")
        self._content = content
        return metrics_by_step, goal
