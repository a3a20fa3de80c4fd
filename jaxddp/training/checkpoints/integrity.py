"""Verifies checkpoints by manifests, which hold the size and the SHA-256 of every file of a complete checkpoint.

The manifest of a step, `STEP/manifest.json`, also holds the step and the run, and is removed with the step. The index
beside the steps, `manifests.json`, holds the SHA-256 of every manifest and of `validation.json`, so a missing manifest
is detected as damage. Both files also hold a SHA-256 of their other content.

Orbax's own metadata cannot hold these hashes: `custom_metadata` is written before the files that would be hashed, and
the metadata of a directory of checkpoints is written once and never changed.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.phases import BYTES, doing, reached
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.training.checkpoints.file_digests import FileVersion, digests_of, file_version, large_files
from jaxddp.training.checkpoints.manifest_format import Index, StepManifest, sha256
from jaxddp.training.checkpoints.run_identity import RunIdentity

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a work directory."""
MANIFEST = "manifest.json"
INDEX = "manifests.json"
DAMAGED_SUFFIX = ".damaged"
"""The suffix that the directory of a damaged step is given."""
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's metadata file of a step; Orbax reads the metadata of all steps when it opens the directory."""
_REQUIRED_FILES = (METADATA, "progress/metadata", "state/_METADATA", "state/manifest.ocdbt")
"""The files of Orbax that every restore needs."""
_POLL_SECONDS = 0.02


class Integrity:
    """The manifests of a directory of checkpoints.

    Only one process writes. A file that cannot be read is treated as damaged. If a file cannot be written, InputError
    is raised.

    Args:
        workdir: the folder of config.json, which names the run. The default is the parent of `directory`. If
            `directory` was resolved from a link, give the parent of the link.

    Attributes:
        run: the run that the checkpoints must belong to, from config.json; None if config.json names no run.
        fault: the fault of the index; None if it has none.
    """

    def __init__(self, directory: Path, workdir: Path | None = None):
        self.directory = directory
        self.run = RunIdentity.in_workdir(workdir or directory.parent)
        self._writer = self.run
        self.fault: str | None = None
        self._index = Index()
        self._foreign_index, self._foreign_fault = Index(), ""
        self._early_digests: dict[FileVersion, str] = {}
        # A thread writes the manifest of a step while training goes on.
        self._lock = threading.Lock()
        self._read_index()

    def set_writer(self, run: RunIdentity | None) -> None:
        """Write manifests for this run from now on. The attribute `run` is replaced if its id differs."""
        self._writer = run
        if self.run is not None and run is not None and self.run.id != run.id:
            self.run = run

    def write(self, step: int) -> None:
        """Hash all files of a complete checkpoint, and write its manifest and the index."""
        folder = self.directory / str(step)
        with files.readable_errors(folder):
            names = sorted(_names(folder))
            digests = dict(zip(names, digests_of(folder, names, self._early_digests), strict=True))
            sizes = {name: (folder / name).stat().st_size for name in names}
        content = StepManifest(step, {name: (sizes[name], digests[name]) for name in names}, self._writer).encode()
        self._early_digests.clear()
        files.replace(folder / MANIFEST, content)
        with self._lock:
            # Drop the steps that Orbax has removed.
            present = {str(each) for each in steps_in(self.directory)}
            self._index.steps = {name: digest for name, digest in self._index.steps.items() if name in present}
            self._index.steps[str(step)] = sha256(content)
            self._write_index()

    @contextmanager
    def hashing_early(self, step: int) -> Iterator[None]:
        """Hash the complete large files of a step while Orbax writes the step.

        `write` uses the digest of a file that has not changed since, also if Orbax has renamed it.
        """
        finished = threading.Event()
        thread = threading.Thread(target=self._hash_early, args=(step, finished), name="early hashes")
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()

    def _hash_early(self, step: int, finished: threading.Event) -> None:
        last: dict[int, FileVersion] = {}
        while not finished.wait(_POLL_SECONDS):
            # Orbax adds a suffix to the step in the name of an unfinished directory. If it names the directory in
            # another way, no file is hashed early.
            with suppress(OSError):
                places = (
                    place for place in self.directory.glob(f"{step}.*") if not place.name.endswith(DAMAGED_SUFFIX)
                )
                candidates = [file for place in places for file in large_files(place)]
                for file, version in candidates:
                    # A file that is still being written changes between two polls.
                    if last.get(version[1]) == version and version not in self._early_digests and not finished.is_set():
                        with files.open_regular(file) as opened:
                            digest = hashlib.file_digest(opened, "sha256").hexdigest()
                            # Another file may have replaced the file at this path.
                            if file_version(os.fstat(opened.fileno())) == version:
                                self._early_digests[version] = digest
                    last[version[1]] = version

    def forget(self, step: int) -> None:
        """Remove the digest of an earlier checkpoint of a step that is about to be written."""
        with self._lock:
            removed = self._index.steps.pop(str(step), None) is not None
            # Write the index before the first checkpoint: later, a missing index or the index of another run counts
            # as damage.
            if removed or self._index.run_id != self._writer_id or not (self.directory / INDEX).exists():
                self._write_index()

    def needs_manifest(self, step: int) -> bool:
        """Return whether a step must have a manifest.

        A step has no manifest if an older release saved it, or if the run was killed before the manifest was written.
        """
        expected = self.fault is not None or str(step) in self._index.steps
        return expected or (self.directory / str(step) / MANIFEST).exists()

    def run_id(self, step: int) -> str | None:
        """Return the id of the run that the manifest of a step names; None if it names no run or is unreadable."""
        with suppress(OSError, ValueError):
            run = StepManifest.parse(files.read(self.directory / str(step) / MANIFEST)).run
            return None if run is None else run.id
        return None

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
            if not self.needs_manifest(step):
                return next((f"{name} is missing" for name in _REQUIRED_FILES if not (folder / name).is_file()), None)
            return self._compare(folder, step, quick)
        except OSError as error:
            files.check_server(folder, error)
            place = Path(error.filename or folder)
            name = place.relative_to(folder) if place.is_relative_to(folder) else place
            missing = isinstance(error, FileNotFoundError)
            return f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})"

    def _compare(self, folder: Path, step: int, quick: bool) -> str | None:
        content = files.read(folder / MANIFEST)
        try:
            manifest = StepManifest.parse(content)
        except ValueError as error:
            return f"{MANIFEST} is damaged ({error})"
        if (other := manifest.differs(step, self.run)) is not None:
            return other
        if self._index.steps.get(str(step), sha256(content)) != sha256(content):
            return f"{MANIFEST} is not the one that was written"
        saved_files = manifest.files
        for name, (size, _) in saved_files.items():
            status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != size:
                return f"{name} has {status.st_size:,} bytes, and {size:,} were saved"
        if extra := sorted(_names(folder) - saved_files.keys()):
            return f"{extra[0]} does not belong to it"
        if quick:
            return None
        hashed, total = 0, sum(size for size, _ in saved_files.values())
        with doing(f"verifying step {step:,}", total, BYTES):
            digests = digests_of(folder, list(saved_files))
            for (name, (size, was)), now in zip(saved_files.items(), digests, strict=True):
                if now != was:
                    return f"{name} does not hold what was saved"
                hashed += size
                reached(hashed)
        return None

    def expect_validations(self, content: bytes, present: bytes | None) -> None:
        """Accept new content of `validation.json`, which is about to be written, in addition to its present content."""
        with self._lock:
            self._index.validations = [sha256(one) for one in (content, present) if one is not None]
            self._write_index()

    def expects_validations(self) -> bool:
        """Whether the index lists a `validation.json`."""
        return bool(self._index.validations)

    def fault_of_validations(self, content: bytes) -> str | None:
        """Return why the index rejects content of `validation.json`; None if the index lists this content, or none."""
        digest, digests = sha256(content), self._index.validations
        if digest in self._foreign_index.validations:
            return f"{INDEX}, which lists it, {self._foreign_fault}"
        return f"its SHA-256 is not that in {INDEX}" if digests and digest not in digests else None

    @property
    def _writer_id(self) -> str | None:
        return None if self._writer is None else self._writer.id

    def _read_index(self) -> None:
        try:
            index = Index.parse(files.read(self.directory / INDEX))
            if self.run is None or index.run_id in (None, self.run.id):
                self._index = index
            else:
                self._foreign_fault = f"is of run {index.run_id}, and {CONFIG_FILE} names run {self.run.id}"
                self._foreign_index, self.fault = index, self._foreign_fault
        except FileNotFoundError:
            if any((self.directory / str(step) / MANIFEST).exists() for step in steps_in(self.directory)):
                self.fault = "is missing"
        except OSError as error:
            self.fault = f"cannot be read ({error.strerror})"
        except ValueError as error:
            self.fault = f"is damaged ({error})"

    def _write_index(self) -> None:
        if self.fault is not None:
            # Rebuild the index from the manifests that are undamaged.
            for step in steps_in(self.directory):
                with suppress(OSError, ValueError):
                    content = files.read(self.directory / str(step) / MANIFEST)
                    if StepManifest.parse(content).differs(step, self.run) is None:
                        self._index.steps.setdefault(str(step), sha256(content))
            self.fault = None
        self._index.run_id = self._writer_id
        files.replace(self.directory / INDEX, self._index.encode())


def steps_in(directory: Path) -> list[int]:
    """Return all steps that have a directory, in order, also damaged steps."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and name == str(int(name)))


def _names(folder: Path) -> set[str]:
    """Return the relative paths of all files below a folder, without the manifest and without hidden files."""

    def fail(error: OSError) -> None:
        raise error

    paths: set[str] = set()
    for place, _, names in os.walk(folder, onerror=fail):
        relative = Path(place).relative_to(folder)
        paths |= {(relative / name).as_posix() for name in names if not name.startswith(".")}
    return paths - {MANIFEST}
