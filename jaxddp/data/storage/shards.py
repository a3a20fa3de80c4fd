"""Large files that hold many images, in a folder on this machine or below a URL, and their indexes.

An index holds columns, such as the offset and the label, of every image of some files. It is saved next to the files
or, where that folder cannot be written, in the cache folder. It holds the size and the modification time of every file,
so changed files are indexed again. It also holds its own hash, so a damaged index is not used.
"""

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.phases import doing, moved, reached
from jaxddp.data.faults import Refuse
from jaxddp.data.storage.root import Folder
from jaxddp.data.storage.store import CachedStore, Store, name_of_folder, read_sealed, write_sealed

Columns = Mapping[str, np.ndarray]
"""The columns of a file's images, by name."""
_FORMAT = 2
_COUNT = "count"
# Reading labels mostly waits for the disk or a server.
_THREADS = 16
_SECONDS = 3600.0
"""The longest wait for another process of this machine that indexes the same files; then this process indexes them."""
_log = logging.getLogger("jaxddp.data")
SHARDS = (".tar", ".parquet")


@dataclass(frozen=True)
class ShardFile:
    """One file of a folder; `str` returns its readable name."""

    folder: Folder
    path: str
    """The path in the folder."""

    def __str__(self) -> str:
        return self.folder.name(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def size(self) -> int:
        """The size in bytes. Raises: OSError, or an error of the store."""
        return self.folder.state(self.path)[0]


def split_address(address: str) -> tuple[str, str]:
    """Return (folder, pattern) of an address: the parts before and after the last slash that no pattern precedes.

    The pattern is empty if the address has neither `{`, `*` nor `?`, and does not end like a shard (.tar, .parquet).
    """
    special = min((at for sign in "{*?" if (at := address.find(sign)) >= 0), default=len(address))
    if special == len(address) and not address.lower().endswith(SHARDS):
        return address, ""
    folder, slash, _ = address[:special].rpartition("/")
    return folder or slash or ".", address[len(folder) + len(slash) :]


def with_cache(store: Store, folder: Folder, cache: str | None) -> Store:
    """Return a store that keeps the images of a URL in the folder `cache`; the same store if `cache` is None.

    Raises:
        InputError: the files are on this machine.
    """
    if cache is None:
        return store
    if folder.root is not None:
        advice = ("leave ", Key("data.local_cache"), " out")
        raise InputError(
            Key("data.local_cache", cache), f": {folder.name()} is on this machine and read in place", advice=advice
        )
    return CachedStore(store, cache)


def load_or_build_index(
    name: str,
    folder: Folder,
    paths: Sequence[str],
    about: str,
    read: Callable[[str, int], tuple[Columns, list[str]]],
    refuse: Refuse,
) -> dict[str, Columns]:
    """Return the columns of each file, by path, from an earlier run if no file has changed; otherwise read and save.

    If the columns cannot be saved, a warning is logged. With faults, they are not saved: faults are reported each time.

    Args:
        name: the name of the index; a folder may have several.
        about: a text with everything on which the columns depend, besides the files.
        read: returns the columns of a file, from its path and size, and its faults; an `InputError` is a fault too.
        refuse: is called with each fault. A file that is missing or cannot be read is left out.

    Raises: InputError if `refuse` raises it, or no file can be used.
    """
    states: dict[str, tuple[int, str]] = {}
    for path in paths:
        try:
            states[path] = folder.state(path)
        except FileNotFoundError:
            refuse(f"{folder.name(path)}: no such file; download it again, or correct its name")
    stamp = json.dumps([_FORMAT, about, *states.items()])
    cached = files.cache_folder() / f"{name_of_folder(folder.root or folder.name())}-{name}.jaxddp-index"
    places = [cached] if folder.root is None else [folder.root / f"{name}.jaxddp-index", cached]
    columns: dict[str, Columns] = {}
    with files.in_turn(cached.with_suffix(".lock"), _SECONDS, "indexing the same files"):
        if (saved := next(filter(None, (_load(place, stamp) for place in places)), None)) is not None:
            ends = np.cumsum(saved[_COUNT])[:-1]
            parts = {column: np.split(values, ends) for column, values in saved.items() if column != _COUNT}
            return {path: {name: part[row] for name, part in parts.items()} for row, path in enumerate(states)}
        has_faults = len(states) < len(paths)
        for path, result, faults in _read(folder, states, read):
            has_faults |= bool(faults)
            for fault in faults:
                refuse(fault)
            if result is not None:
                columns[path] = result
        if not columns:
            raise InputError(f"{folder.name()}: none of {counted(len(paths), 'file')} can be used; repair one")
        if not has_faults:
            _save(places, stamp, [*columns.values()])
    return columns


def _read(
    folder: Folder, states: Mapping[str, tuple[int, str]], read: Callable[[str, int], tuple[Columns, list[str]]]
) -> Iterator[tuple[str, Columns | None, list[str]]]:
    def in_thread(path: str) -> tuple[str, Columns | None, list[str]]:
        try:
            with files.reading(folder.name(path), "make it a readable file"):
                return path, *read(path, states[path][0])
        except InputError as error:
            return path, None, [str(error)]

    total = counted(len(states), "file")
    with ThreadPoolExecutor(_THREADS) as pool, doing(f"indexing {total}, once", len(states), "file"):
        for done, result in enumerate(pool.map(in_thread, states), 1):
            reached(done)
            moved()
            yield result


def _load(place: Path, stamp: str) -> Columns | None:
    with suppress(OSError):
        if (content := read_sealed(place)) is not None:
            with np.load(io.BytesIO(content), allow_pickle=False) as saved:
                if saved["stamp"].item() == stamp:
                    return {name: saved[name] for name in saved.files if name != "stamp"}
    return None


def _save(places: Sequence[Path], stamp: str, parts: Sequence[Columns]) -> None:
    arrays: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays |= {"stamp": np.array(stamp), _COUNT: np.array([len(next(iter(part.values()))) for part in parts])}
    content = io.BytesIO()
    np.savez(content, **arrays)
    for place in places:
        try:
            return write_sealed(place, content.getvalue())
        except OSError as error:
            _log.debug("%s: cannot be written (%s)", place, error.strerror)
    advice = f"set {files.CACHE_VARIABLE} to a folder that can be written"
    _log.warning(f"{places[-1]}: the index cannot be saved and is built at each start; {advice}")
