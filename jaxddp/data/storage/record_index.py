"""An index of the offset and the label of every record of a data set, built in one pass and saved for the next run.

The index is saved next to the files or, where that folder cannot be written, in the cache folder. It holds the size and
the modification time of every file, so changed files are indexed again. It also holds its own hash, so a damaged
index is not used. The index is written to another file, which is then renamed, so a reader never sees a part of it.
"""

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.files import CACHE_VARIABLE, cache_folder
from jaxddp.core.phases import doing
from jaxddp.core.wording import counted
from jaxddp.data.storage.cache import name_of_folder, read_sealed, write_sealed

_FORMAT = 1
_log = logging.getLogger("jaxddp.data")

Columns = Mapping[str, np.ndarray]
"""The arrays of an index, by name."""


@dataclass(frozen=True, eq=False)
class RecordIndex:
    """The records of several files, one file after the other."""

    offset: np.ndarray
    """int64[N], the position of each record in its file."""
    label: np.ndarray
    """int32[N], the label of each record."""

    def __repr__(self) -> str:
        return f"RecordIndex({counted(len(self.offset), 'record')})"


def load_or_build_index(
    name: str, folder: Path, files: Sequence[str], about: str, build: Callable[[], RecordIndex]
) -> RecordIndex:
    """Return the saved index of some files if they have not changed; otherwise build and save it.

    If the index cannot be saved, a warning is logged.

    Args:
        name: the name of the index; a folder may have several.
        files: names in the folder.
        about: a text with everything else on which the index depends.
        build: builds the index.

    Raises: InputError if a file is missing.
    """
    stamp = json.dumps([_FORMAT, about, [_state(folder / file) for file in files]])
    places = (folder / f"{name}.jaxddp-index", cache_folder() / f"{name_of_folder(folder)}-{name}.jaxddp-index")

    def build_columns() -> Columns:
        with doing(f"indexing {counted(len(files), 'record file')}, once", len(files), "file"):
            index = build()
        return {"offset": index.offset, "label": index.label}

    columns = load_or_build_columns(places, stamp, build_columns)
    return RecordIndex(columns["offset"], columns["label"])


def load_or_build_columns(places: Sequence[Path], stamp: str, build: Callable[[], Columns]) -> Columns:
    """Return the arrays that an earlier run saved with the same stamp; otherwise build and save them.

    If the arrays cannot be saved, a warning is logged.

    Args:
        places: the files in which the arrays may be. They are saved in the first one that can be written.
        stamp: a text with everything on which the arrays depend.
    """
    for place in places:
        if (columns := _load(place, stamp)) is not None:
            return columns
    columns = build()
    for place in places:
        try:
            _save(place, columns, stamp)
            return columns
        except OSError as error:
            _log.debug("%s: cannot be written (%s)", place, error.strerror)
    advice = f"set {CACHE_VARIABLE} to a folder that can be written"
    _log.warning(f"{places[-1]}: the index cannot be saved and is built at each start; {advice}")
    return columns


def _state(file: Path) -> tuple[str, int, int]:
    with files.reading(file, "put the file back, or make the data set again"):
        status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


def _load(place: Path, stamp: str) -> Columns | None:
    try:
        content = read_sealed(place)
    except OSError:
        return None
    if content is None:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as saved:
        if saved["stamp"].item() != stamp:
            return None
        return {name: saved[name] for name in saved.files if name != "stamp"}


def _save(place: Path, columns: Columns, stamp: str) -> None:
    content = io.BytesIO()
    arrays: dict[str, Any] = {"stamp": np.array(stamp), **columns}
    np.savez(content, **arrays)
    write_sealed(place, content.getvalue())
