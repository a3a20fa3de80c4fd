"""Functions that the readers of array files share: errors that name the file, checks of lengths, class names."""

import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key, show, size, some
from jaxddp.data.arrays import ArrayTable, as_pixels
from jaxddp.data.faults import check_distinct, find_repeats
from jaxddp.data.source import Labels

_CHUNK = 1 << 20
_MAX_NUMBERED = 100_000
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.0)?")
_DAMAGE = (AttributeError, EOFError, LookupError, NotImplementedError, TypeError, ValueError)


@contextmanager
def as_input_errors(where: Path | str, advice: str = "download it again") -> Iterator[None]:
    """Turn errors in the block, which reads a file, into an `InputError` whose message begins with `where`.

    Args:
        advice: what to do if the file is damaged or missing.
    """
    with files.reading(where, "give a readable file", missing=f"no such file; {advice}"):
        try:
            yield
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except UnicodeDecodeError:
            raise InputError(f"{where}: not UTF-8; save the file as UTF-8") from None
        # NumPy raises ValueError for data that are not an array, and KeyError for a missing array. zipfile raises
        # NotImplementedError for a version that it does not know.
        # A manifest whose values have other types raises AttributeError or TypeError.
        except (*_DAMAGE, zlib.error, lzma.LZMAError, OSError, BadZipFile) as error:
            # Damaged gzip and bzip2 are an OSError without a number.
            if getattr(error, "errno", None) is not None:
                raise
            raise InputError(f"{where}: damaged ({error}); {advice}") from None


def read_rest(stream: BufferedIOBase, promised: int, stored: int | None) -> bytearray:
    """Read the bytes after a header; their number must be `promised`.

    Memory is allocated as bytes are read, and reading stops at the promised number. So a forged header allocates no
    more than the stream holds, and a small file that unpacks to gigabytes cannot fill the memory.

    Args:
        stored: the number of bytes after the header, as a zip archive or a gzip file states it; None if it states none.
            It is compared first, because a small file may unpack to gigabytes before it ends.

    Raises: InputError if the memory of the machine is too small; see also `check_length`.
    """
    if stored is not None:
        check_length(stored, promised)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if stored is not None and promised > memory:
        advice = "save it as a .npy file, of which a batch reads only its rows"
        raise InputError(f"an array of {size(promised)}, and this machine has {size(memory)} of memory; {advice}")
    data = bytearray()
    while piece := stream.read1(min(_CHUNK, promised + 1 - len(data))):
        data += piece
    check_length(len(data), promised)
    return data


def check_length(actual: int, promised: int) -> None:
    """Check the number of bytes after a header. Raises: InputError if it is not `promised`."""
    if actual != promised:
        begin, following = ("cut short: ", actual) if actual < promised else ("", "more")
        raise InputError(f"{begin}the header promises {promised} bytes, but {following} follow it; download it again")


def read_names(file: Path) -> tuple[str, ...]:
    """Read the names of the classes from a UTF-8 file, one per line. Blank lines may follow. Raises: InputError."""
    with as_input_errors(file):
        names = [line.strip() for line in files.read(file).decode("utf-8-sig").rstrip().splitlines()]
        if not names:
            raise InputError("empty; write one class name per line")
        if "" in names:
            raise InputError(f"line {names.index('') + 1} is blank; write one class name per line, in label order")
    check_names(names, lambda place: f"{file}:{place + 1}")
    return tuple(names)


def check_names(names: Sequence[str], position_of: Callable[[int], str]) -> None:
    """Check that the names of classes are different and do not look alike.

    Args:
        position_of: returns the position of a name in the file, from the name's index, for messages.

    Raises: InputError if two names are equal or look alike.
    """
    check_distinct(names, lambda name: position_of(names.index(name)))
    for place, first in find_repeats(np.array(names)):
        fault = f"{show(names[place])} is also the name in {position_of(first)}"
        raise InputError(f"{position_of(place)}: {fault}; give each class its own name")


def are_numbers(names: Iterable[str]) -> bool:
    """Return whether the names of classes are whole numbers, such as grades; pandas may write 3 as 3.0."""
    return all(_NUMBER.fullmatch(name) for name in names)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of classes sorted, by value if all are whole numbers."""
    ordered = sorted(names)
    return sorted(ordered, key=float) if are_numbers(ordered) else ordered


def check_grades(labels: Labels) -> None:
    """Raise `InputError` if the classes are whole numbers in another order than by value, so no grades."""
    if labels.form == "one label" and are_numbers(labels.ids) and [*labels.ids] != in_order(labels.ids):
        problem = f": kappa compares grades, and the classes are in the order {some(labels.ids, 4)}"
        raise InputError(Key("eval.metrics"), problem, advice="name the classes 00, 01, and so on")


def numbered_names(*labels: np.ndarray) -> tuple[str, ...]:
    """Return names "0", "1", ... up to the largest label of all splits, for data without names of classes.

    Raises: InputError if a label is too large to be the number of a class.
    """
    if columns := [array.shape[1] for array in labels if array.ndim == 2 and array.shape[1] > 1]:
        return tuple(map(str, range(max(columns))))
    # `check_labels` rejects labels of other dtypes.
    last = max((int(array.max(initial=0)) for array in labels if np.issubdtype(array.dtype, np.integer)), default=0)
    if last >= _MAX_NUMBERED:
        raise InputError(f"label {last}: classes without names are numbered below {_MAX_NUMBERED}; number them from 0")
    return tuple(map(str, range(last + 1)))


def make_table(
    images: np.ndarray, labels: np.ndarray, names: tuple[str, ...], images_from: Path | str, labels_from: Path | str
) -> ArrayTable:
    """Return an `ArrayTable`. Error messages begin with the file of the images or of the labels.

    Args:
        images: see `as_pixels`; gray images may have the shape [N, H, W].
        labels: see `ArrayTable`; single labels may have the shape [N, 1].
    """
    with as_input_errors(images_from):
        images = as_pixels(images[..., None] if images.ndim == 3 else images)
    with as_input_errors(labels_from):
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        return ArrayTable(images, labels, names)
