"""Manifests: what every file of a checkpoint held when the checkpoint was complete, so that damage is found later.

A step's manifest, `STEP/manifest.json`, holds its number, its run, and the size and the SHA-256 of each of its files,
and goes away with the step. The index beside the steps, `manifests.json`, holds the SHA-256 of every manifest and of
`validation.json`: a manifest that is missing is damage, and not a checkpoint that never had one. Both hold a SHA-256 of
themselves.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.phases import doing
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.training.checkpoints.manifest_format import Index, Listing, sha256
from jaxddp.training.checkpoints.run_identity import RunIdentity

CHECKPOINTS = "checkpoints"
"""The folder of a work directory that holds them."""
MANIFEST = "manifest.json"
INDEX = "manifests.json"
ASIDE = ".damaged"
"""What ends the name of a step's directory that was set aside."""
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's file about a step, which it reads of all steps at once."""
_LEAST = (METADATA, "progress/metadata", "state/_METADATA", "state/manifest.ocdbt")
"""Without these files of Orbax no checkpoint restores."""
_THREADS = 4
_LARGE = 1 << 20
"""Bytes of a file that is worth being hashed early."""
_LOOK_SECONDS = 0.02

Written = tuple[int, int, int, int]
"""What stays of a file that is renamed, and changes with its content: device, inode, size and time of change."""


class Integrity:
    """The manifests of one directory of checkpoints.

    One process writes them. What cannot be read counts as damage; writing raises InputError.

    Args:
        workdir: has the config.json that names their run; the folder around them where absent, which a link hides.

    Attributes:
        run: whose checkpoints they are to be, as config.json was found; None where nothing says so.
        fault: what is wrong with the index, or None.
    """

    def __init__(self, directory: Path, workdir: Path | None = None):
        self.directory = directory
        self.run = RunIdentity.in_workdir(workdir or directory.parent)
        self._writer = self.run
        self.fault: str | None = None
        self._index = Index()
        self._another, self._of_another = Index(), ""
        self._early: dict[Written, str] = {}
        # The manifest of a step is written while the loop goes on.
        self._lock = threading.Lock()
        self._read_index()

    def belong_to(self, run: RunIdentity | None) -> None:
        """What is written from here on is this run's; what is there is compared as before, unless another begins."""
        self._writer = run
        if self.run is not None and run is not None and self.run.id != run.id:
            self.run = run

    def write(self, step: int) -> None:
        """Hash all files of a complete checkpoint into its manifest."""
        folder = self.directory / str(step)
        with files.readable_errors(folder):
            names = sorted(_names(folder))
            digests = dict(zip(names, _digests(folder, names, self._early), strict=True))
            sizes = {name: (folder / name).stat().st_size for name in names}
        content = Listing(step, {name: (sizes[name], digests[name]) for name in names}, self._writer).encode()
        self._early.clear()
        files.replace(folder / MANIFEST, content)
        with self._lock:
            # Orbax removes old steps by itself.
            there = {str(each) for each in steps_in(self.directory)}
            self._index.steps = {name: digest for name, digest in self._index.steps.items() if name in there}
            self._index.steps[str(step)] = sha256(content)
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
            known = self._index.steps.pop(str(step), None) is not None
            # Once there is an index, its absence is damage; and so is another run's.
            if known or self._index.run_id != self._writer_id or not (self.directory / INDEX).exists():
                self._write_index()

    def has(self, step: int) -> bool:
        """Whether the step should have a manifest: those of older releases, and of runs killed before it, have none."""
        known = self.fault is not None or str(step) in self._index.steps
        return known or (self.directory / str(step) / MANIFEST).exists()

    def run_id(self, step: int) -> str | None:
        """Of the run that a checkpoint is of by its manifest; None where that says nothing, or cannot be read."""
        with suppress(OSError, ValueError):
            run = Listing.parse(files.read(self.directory / str(step) / MANIFEST)).run
            return None if run is None else run.id
        return None

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
            with nullcontext() if quick else doing(f"verifying step {step:,}"):
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
            told = Listing.parse(content)
        except ValueError as error:
            return f"{MANIFEST} is damaged ({error})"
        if (other := told.differs(step, self.run)) is not None:
            return other
        if self._index.steps.get(str(step), sha256(content)) != sha256(content):
            return f"{MANIFEST} is not the one that was written"
        listed = told.files
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
            self._index.validations = [sha256(content), *self._index.validations[:1]]
            self._write_index()

    def expects_validations(self) -> bool:
        """Whether there is a `validation.json`, as far as the index knows."""
        return bool(self._index.validations)

    def fault_of_validations(self, content: bytes) -> str | None:
        """What is wrong if `validation.json` holds this; one that the index does not know of may hold anything."""
        digest, known = sha256(content), self._index.validations
        if digest in self._another.validations:
            return f"{INDEX}, which knows it, {self._of_another}"
        return f"its SHA-256 is not that in {INDEX}" if known and digest not in known else None

    @property
    def _writer_id(self) -> str | None:
        return None if self._writer is None else self._writer.id

    def _read_index(self) -> None:
        try:
            found = Index.parse(files.read(self.directory / INDEX))
            if self.run is None or found.run_id in (None, self.run.id):
                self._index = found
            else:
                self._of_another = f"is of run {found.run_id}, and {CONFIG_FILE} names run {self.run.id}"
                self._another, self.fault = found, self._of_another
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
                    if Listing.parse(content).differs(step, self.run) is None:
                        self._index.steps.setdefault(str(step), sha256(content))
            self.fault = None
        self._index.run_id = self._writer_id
        files.replace(self.directory / INDEX, self._index.encode())


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
