"""Manifests: what every file of a checkpoint held when the checkpoint was complete, so that damage is found later.

A step's manifest, `STEP/manifest.json`, holds the size and the SHA-256 of each of its files, and goes away with the
step. The index beside the steps, `manifests.json`, holds the SHA-256 of every manifest and of `validation.json`: a
manifest that is missing is damage, and not a checkpoint that never had one. Both hold a SHA-256 of themselves.
"""

import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jaxddp.files as files
import jaxddp.job.progress as progress

CHECKPOINTS = "checkpoints"
"""The folder of a work directory that holds them."""
MANIFEST = "manifest.json"
INDEX = "manifests.json"
ASIDE = ".damaged"
"""What ends the name of a step's directory that was set aside."""
_SEAL = "sha256"
_LEAST = ("_CHECKPOINT_METADATA", "progress/metadata", "state/_METADATA", "state/manifest.ocdbt")
"""Without these files of Orbax no checkpoint restores."""
_THREADS = 4
_LARGE = 1 << 20
"""Bytes of a file that is worth being hashed early."""
_LOOK_SECONDS = 0.02

Written = tuple[int, int, int, int]
"""What stays of a file that is renamed, and changes with its content: device, inode, size and time of change."""


class Manifests:
    """The manifests of one directory of checkpoints.

    One process writes them. What cannot be read counts as damage; writing raises InputError.

    Attributes:
        fault: what is wrong with the index, or None.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.fault: str | None = None
        self._steps: dict[str, str] = {}
        self._validations: list[str] = []
        self._early: dict[Written, str] = {}
        # The manifest of a step is written while the loop goes on.
        self._lock = threading.Lock()
        self._read_index()

    def write(self, step: int) -> None:
        """Hash all files of a complete checkpoint into its manifest."""
        folder = self.directory / str(step)
        with files.readable_errors(folder):
            names = sorted(_names(folder))
            digests = dict(zip(names, _digests(folder, names, self._early), strict=True))
            sizes = {name: (folder / name).stat().st_size for name in names}
        listed = {name: {"bytes": sizes[name], "sha256": digests[name]} for name in names}
        content = _sealed({"step": step, "files": listed})
        self._early.clear()
        files.replace(folder / MANIFEST, content)
        with self._lock:
            # Orbax removes old steps by itself.
            there = {str(each) for each in steps_in(self.directory)}
            self._steps = {name: digest for name, digest in self._steps.items() if name in there}
            self._steps[str(step)] = _sha256(content)
            self._write_index()

    @contextmanager
    def hashing_early(self, step: int) -> Iterator[None]:
        """While a step is being written, hash those of its files that are: the largest are, long before the last.

        `write` takes the digest of a file that has not changed since, whatever its name is then.
        """
        over = threading.Event()
        thread = threading.Thread(target=self._hash_early, args=(step, over), name="early hashes")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _hash_early(self, step: int, over: threading.Event) -> None:
        last: dict[int, Written] = {}
        while not over.wait(_LOOK_SECONDS):
            # Orbax's name for what is not complete begins so; under another, nothing is hashed early. It renames it.
            with suppress(OSError):
                found = [file for place in self.directory.glob(f"{step}.*") for file in _large_files(place)]
                for file, written in found:
                    # One that is still growing changes from look to look.
                    if last.get(written[1]) == written and written not in self._early and not over.is_set():
                        with files.open_regular(file) as opened:
                            digest = hashlib.file_digest(opened, "sha256").hexdigest()
                            # Its name may be another by now.
                            if _written(os.fstat(opened.fileno())) == written:
                                self._early[written] = digest
                    last[written[1]] = written

    def forget(self, step: int) -> None:
        """The step is about to be written: what is known of another one of its number must not stand for it."""
        with self._lock:
            # Once there is an index, its absence is damage.
            if self._steps.pop(str(step), None) is not None or not (self.directory / INDEX).exists():
                self._write_index()

    def has(self, step: int) -> bool:
        """Whether the step should have a manifest: those of older releases, and of runs killed before it, have none."""
        return self.fault is not None or str(step) in self._steps or (self.directory / str(step) / MANIFEST).exists()

    def check(self, step: int, *, quick: bool = False) -> str | None:
        """The first thing that is wrong with a checkpoint, beginning with the file's name; None where nothing is.

        Args:
            quick: compare names and sizes only.

        Raises:
            FileNotFoundError: there is no directory of this step.
            Unreachable: the server of the files does not answer, which is no damage.
        """
        folder = self.directory / str(step)
        if not folder.is_dir():
            raise FileNotFoundError(str(folder))
        try:
            if not self.has(step):
                return next((f"{name} is missing" for name in _LEAST if not (folder / name).is_file()), None)
            with nullcontext() if quick else progress.doing(f"verifying step {step:,}"):
                return self._compare(folder, step, quick)
        except OSError as error:
            files.check_server(folder, error)
            place = Path(error.filename or folder)
            name = place.relative_to(folder) if place.is_relative_to(folder) else place
            missing = isinstance(error, FileNotFoundError)
            return f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})"

    def _compare(self, folder: Path, step: int, quick: bool) -> str | None:
        content = files.read(folder / MANIFEST)
        if self._steps.get(str(step), _sha256(content)) != _sha256(content):
            return f"{MANIFEST} is not the one that was written"
        try:
            listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in _unsealed(content)["files"].items()}
        except ValueError as error:
            return f"{MANIFEST} is damaged ({error})"
        for name, (size, _) in listed.items():
            found = (folder / name).stat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a regular file"
            if found.st_size != size:
                return f"{name} has {found.st_size:,} bytes, and {size:,} were saved"
        if extra := sorted(_names(folder) - listed.keys()):
            return f"{extra[0]} was not saved with it"
        if quick:
            return None
        digests = zip(listed.items(), _digests(folder, list(listed)), strict=True)
        return next((f"{name} does not hold what was saved" for (name, (_, was)), now in digests if now != was), None)

    def expect_validations(self, content: bytes) -> None:
        """`validation.json` is about to hold this. Until it does, what it holds now is right too."""
        with self._lock:
            self._validations = [_sha256(content), *self._validations[:1]]
            self._write_index()

    def expects_validations(self) -> bool:
        """Whether there is a `validation.json`, as far as the index knows."""
        return bool(self._validations)

    def wrote_validations(self, content: bytes) -> bool:
        """Whether this is what `validation.json` held; one that the index does not know of may hold anything."""
        return not self._validations or _sha256(content) in self._validations

    def _read_index(self) -> None:
        try:
            content = _unsealed(files.read(self.directory / INDEX))
            self._steps, self._validations = content["steps"], content["validations"]
            return
        except FileNotFoundError:
            if any((self.directory / str(step) / MANIFEST).exists() for step in steps_in(self.directory)):
                self.fault = "is missing"
        except OSError as error:
            self.fault = f"cannot be read ({error.strerror})"
        except ValueError as error:
            self.fault = f"is damaged ({error})"

    def _write_index(self) -> None:
        if self.fault is not None:
            # What can still be known of it: the manifests that are whole.
            for step in steps_in(self.directory):
                with suppress(OSError, ValueError):
                    content = files.read(self.directory / str(step) / MANIFEST)
                    _unsealed(content)
                    self._steps.setdefault(str(step), _sha256(content))
            self.fault = None
        files.replace(self.directory / INDEX, _sealed({"steps": self._steps, "validations": self._validations}))


def steps_in(directory: Path) -> list[int]:
    """The steps that have a directory, in order, whole or not."""
    try:
        found = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []
    return sorted(int(name) for name in found if name.isascii() and name.isdecimal() and name == str(int(name)))


def _names(folder: Path) -> set[str]:
    """All files below a folder, relative to it, but for the manifest and for hidden ones, such as a file server's."""

    def refuse(error: OSError) -> None:
        raise error

    found: set[str] = set()
    for place, _, names in os.walk(folder, onerror=refuse):
        relative = Path(place).relative_to(folder)
        found |= {(relative / name).as_posix() for name in names if not name.startswith(".")}
    return found - {MANIFEST}


def _digests(folder: Path, names: list[str], known: Mapping[Written, str] | None = None) -> Iterator[str]:
    """The SHA-256 of each file, as hex; that of `known` where there is one."""

    def digest(name: str) -> str:
        file = folder / name
        early = known.get(_written(file.stat())) if known else None
        if early is not None:
            return early
        with files.open_regular(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    # Hashing lets go of Python's lock, so the few large files share the cores.
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(digest, names)


def _written(found: os.stat_result) -> Written:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _large_files(folder: Path) -> Iterable[tuple[Path, Written]]:
    if folder.name.endswith(ASIDE):
        return
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                if (written := _written(Path(place, name).stat()))[2] >= _LARGE:
                    yield Path(place, name), written


def _sealed(content: dict[str, Any]) -> bytes:
    """Content as JSON that also holds the SHA-256 of the rest."""
    seal = _sha256(json.dumps(content).encode())
    return (json.dumps({**content, _SEAL: seal}, indent=1) + "\n").encode()


def _unsealed(data: bytes) -> dict[str, Any]:
    """The content of sealed bytes. Raises: ValueError; a bit of them differs from what was written."""
    try:
        content = json.loads(data)
        del content[_SEAL]
        if _sealed(content) == data:
            return content
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError("its own SHA-256 is another")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
