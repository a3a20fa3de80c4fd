"""A file of JSON lines with the completed rows of an output file, so that an interrupted command can continue.

OUT.partial     {"run": …, "step": …, "images": …, …}     the run, the checkpoint and the images
                {"id": "cat.jpg", "class": "cat", …}       a row for each completed image
"""

import json
import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.files import try_lock
from jaxddp.inference.predictions import Row

_log = logging.getLogger("jaxddp.predictions")


class Partial:
    """A file beside the output file with the completed rows. One process at a time may write the file.

    Args:
        out: the output file.
        header: identifies the prediction. The rows of a file with another header are removed.
        columns: the columns of each row.
    """

    def __init__(self, out: Path, header: Mapping[str, str | int], columns: Sequence[str]):
        self.path = out.with_name(f"{out.name}.partial")
        self._header, self._columns = _line(header), {*columns}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the file for the block. Raises: InputError if another process has the lock or writing fails."""
        while True:
            with files.readable_errors(self.path):
                file = files.open_regular(self.path, "ab")
            with file:
                if not try_lock(file):
                    advice = "wait for it, or give another --out"
                    raise InputError(f"{self.path}: another command is writing there; {advice}")
                # Another command may have ended and removed the file after this process opened it.
                if not self.path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    continue
                yield
                return

    def resume(self, multiple: int, total: int) -> int:
        """Remove unusable last rows, and return the number of remaining rows: `total`, or a multiple of `multiple`.

        Raises: InputError if the file cannot be read or written.
        """
        with files.reading(self.path, "remove it"), files.open_regular(self.path) as file:
            first = file.readline()
            # Line by line, because the rows of features can be larger than the memory.
            ends = array("q", [len(first)])
            for line in file if first == self._header else ():
                if line.endswith(b"\n"):
                    ends.append(ends[-1] + len(line))
        if first == self._header:
            whole = len(ends) - 1
            count = whole if whole == total else whole // multiple * multiple
            with files.readable_errors(self.path):
                os.truncate(self.path, ends[count])
            return count
        if first:
            _log.warning(f"{self.path}: holds rows of other images or of another checkpoint; they are computed again")
        # The file is truncated and not replaced, because the lock belongs to the open file.
        with files.readable_errors(self.path):
            os.truncate(self.path, 0)
        files.append(self.path, self._header)
        return 0

    def append(self, rows: Iterable[Row]) -> None:
        """Append the rows of the next images. Raises: InputError if the file cannot be written."""
        files.append(self.path, b"".join(map(_line, rows)))

    def rows(self) -> Iterator[Row]:
        """Yield all rows, in order. Raises: InputError if a line is not a row."""
        with files.reading(self.path, "predict again"), files.open_regular(self.path) as file:
            next(file)
            for number, line in enumerate(file, 2):
                try:
                    row = files.parse_json(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or row.keys() != self._columns:
                    excerpt = line[:60].decode(errors="replace").strip()
                    raise InputError(f"{self.path}:{number}: no row of predictions: {excerpt!r}; remove the file")
                yield row

    def remove(self) -> None:
        """Remove the file, once the output file is written. Raises: InputError."""
        files.remove(self.path)


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()
