"""What the readers of files share: errors that begin with the file, bytes counted before they are believed, names."""

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxddp.data.arrays import ArrayTable, check_images, check_labels
from jaxddp.errors import InputError

_CHUNK = 1 << 20
_MOST_NUMBERED = 100_000


class Stream(Protocol):
    """An open binary file, plain or decompressing."""

    def read1(self, size: int, /) -> bytes: ...


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turns what can go wrong in reading a file into one line that begins with `where`.

    Raises:
        InputError: instead of itself without the prefix, an OSError, a failed decompression or decoding.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; download or unpack the data set anew") from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8; save the file as UTF-8") from None
    # NumPy's word for contents that make no array is ValueError.
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise InputError(f"{where}: damaged ({error}); download it again") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror}); give a readable file") from None


def read_rest(stream: Stream, promised: int) -> bytearray:
    """The bytes that follow a header, of which it promised so many, up to the end of the stream.

    Memory grows with what the stream holds, never with what the header promises, and no further than that: neither a
    forged header nor a small file that unpacks to gigabytes takes more than the smaller of both.

    Raises:
        InputError: fewer or more bytes than promised.
    """
    data = bytearray()
    try:
        while piece := stream.read1(min(_CHUNK, promised + 1 - len(data))):
            data += piece
    except EOFError:
        raise InputError(
            f"cut short: the compressed data end after {len(data)} of the {promised} bytes that the header promises; "
            "download it again"
        ) from None
    check_length(len(data), promised)
    return data


def check_length(found: int, promised: int) -> None:
    """Compares the bytes after a header with those that it promises.

    Raises:
        InputError: they differ.
    """
    if found < promised:
        raise InputError(f"cut short: the header promises {promised} bytes, {found} follow it; download it again")
    if found > promised:
        raise InputError(f"the header promises {promised} bytes, more follow it; download it again")


def read_names(file: Path) -> tuple[str, ...]:
    """The names of the classes from a text file, one a line; blank lines may follow the last.

    Raises:
        InputError: no such file, one that is not UTF-8, no name, or a blank line between two.
    """
    with reading(file):
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").rstrip().splitlines()]
        if not names:
            raise InputError("empty; write one class name a line")
        if "" in names:
            raise InputError(f"line {names.index('') + 1} is blank; write one class name a line, in the labels' order")
        return tuple(names)


def numbered_names(*labels: np.ndarray) -> tuple[str, ...]:
    """ "0", "1", ... up to the largest label of any of the arrays, for data that do not name their classes.

    Raises:
        InputError: labels so large that they cannot count classes.
    """
    # Labels of another kind are for check_labels to refuse.
    integers = (each for each in labels if np.issubdtype(each.dtype, np.integer))
    last = max((int(each.max(initial=0)) for each in integers), default=0)
    if last >= _MOST_NUMBERED:
        raise InputError(
            f"label {last}: classes without names may be numbered below {_MOST_NUMBERED}; number them from 0"
        )
    return tuple(map(str, range(last + 1)))


def make_table(
    images: np.ndarray, labels: np.ndarray, names: tuple[str, ...], *, images_from: Path | str, labels_from: Path | str
) -> ArrayTable:
    """An `ArrayTable` whose errors begin with the file at fault."""
    with reading(images_from):
        check_images(images)
    with reading(labels_from):
        check_labels(labels, len(images), len(names))
    return ArrayTable(images, labels, names)
