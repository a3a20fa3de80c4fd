"""Functions that the readers of array files share: errors that name the file, checks of lengths, class names."""

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import show
from jaxddp.data.arrays import ArrayTable, as_pixels, check_labels
from jaxddp.data.faults import check_distinct

_CHUNK = 1 << 20
_MOST_NUMBERED = 100_000


@contextmanager
def errors_of(
    where: Path | str, damaged: str = "download it again", *, missing: str = "download or unpack the data set again"
) -> Iterator[None]:
    """Turns errors of reading a file into an `InputError` whose message begins with `where`.

    Args:
        damaged, missing: the advice for a file that is damaged or missing.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; {missing}") from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8; save the file as UTF-8") from None
    # NumPy raises ValueError for data that are not an array, and KeyError for a missing array. zipfile raises
    # NotImplementedError for a version that it does not know.
    except (EOFError, KeyError, NotImplementedError, ValueError, zlib.error, gzip.BadGzipFile, BadZipFile) as error:
        raise InputError(f"{where}: damaged ({error}); {damaged}") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror}); give a readable file") from None


def read_rest(stream: BufferedIOBase, promised: int) -> bytearray:
    """Reads the bytes after a header, which must be as many as the header promises. Raises: see `check_length`.

    The memory grows with the bytes that were read, and reading stops at the promised number. So a forged header cannot
    allocate more than the stream holds, and a small file that unpacks to gigabytes cannot fill the memory.
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


def check_length(actual: int, promised: int) -> None:
    """Checks the number of bytes after a header. Raises: InputError if it is not the promised number."""
    if actual < promised:
        raise InputError(f"cut short: the header promises {promised} bytes, {actual} follow it; download it again")
    if actual > promised:
        raise InputError(f"the header promises {promised} bytes, more follow it; download it again")


def read_names(file: Path) -> tuple[str, ...]:
    """Reads the names of the classes from a UTF-8 file, one per line. Blank lines may follow. Raises: InputError."""
    with errors_of(file):
        names = [line.strip() for line in files.read(file).decode("utf-8-sig").rstrip().splitlines()]
        if not names:
            raise InputError("empty; write one class name a line")
        if "" in names:
            raise InputError(f"line {names.index('') + 1} is blank; write one class name a line, in the labels' order")
    check_names(names, lambda place: f"{file}:{place + 1}")
    return tuple(names)


def check_names(names: Sequence[str], where: Callable[[int], str]) -> None:
    """Checks names of classes.

    Args:
        where: a function of a name's number that returns its place in the file, for messages.

    Raises:
        InputError: two names are equal or look alike.
    """
    check_distinct(names, lambda name: where(names.index(name)))
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        if first.setdefault(name, place) != place:
            before = where(first[name])
            raise InputError(f"{where(place)}: {show(name)} is also the name in {before}; give each class its own name")


def numbered_names(*labels: np.ndarray) -> tuple[str, ...]:
    """Returns names "0", "1", ... up to the largest label of all splits, for data without names of classes.

    Raises: InputError if a label is too large to be the number of a class.
    """
    if columns := [array.shape[1] for array in labels if array.ndim == 2 and array.shape[1] > 1]:
        return tuple(map(str, range(max(columns))))
    # `check_labels` rejects labels of other dtypes.
    integers = (array for array in labels if np.issubdtype(array.dtype, np.integer))
    last = max((int(array.max(initial=0)) for array in integers), default=0)
    if last >= _MOST_NUMBERED:
        raise InputError(
            f"label {last}: classes without names may be numbered below {_MOST_NUMBERED}; number them from 0"
        )
    return tuple(map(str, range(last + 1)))


def make_table(
    images: np.ndarray, labels: np.ndarray, names: tuple[str, ...], *, images_from: Path | str, labels_from: Path | str
) -> ArrayTable:
    """Returns an `ArrayTable`; its errors begin with the file of the images or of the labels."""
    with errors_of(images_from):
        images = as_pixels(images)
    with errors_of(labels_from):
        check_labels(labels, len(images), len(names))
    return ArrayTable(images, labels, names)
