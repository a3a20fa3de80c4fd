"""Predictions while they are made: a file of JSON lines beside the one to be written, so that they can go on.

OUT.partial     {"run": …, "step": …, "images": …, …}     what was asked
                {"id": "cat.jpg", "class": "cat", …}       a row for each image so far
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.inference.predictions import Row
from jaxddp.workdir.lock import took

_log = logging.getLogger("jaxddp.predictions")


class Partial:
    """The rows that were answered so far, beside the file that they become; one process at a time has them.

    Args:
        asked: what tells this question from others; the answers to another one are begun anew.
        columns: of each row.
    """

    def __init__(self, out: Path, asked: Mapping[str, str | int], columns: Sequence[str]):
        self.path = out.with_name(f"{out.name}.partial")
        self._asked, self._columns = _line(asked), {*columns}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others out. Raises: InputError; another prediction is at work there, or the file cannot be written."""
        while True:
            with files.readable_errors(self.path):
                file = files.open_regular(self.path, "ab")
            with file:
                if not took(file):
                    advice = "wait for it, or give another --out"
                    raise InputError(f"{self.path}: another prediction is at work there; {advice}")
                # Another one may have ended, and removed the file, after it was opened here.
                if not self.path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    continue
                yield
                return

    def resume(self, multiple: int, total: int) -> int:
        """How many images were answered before, all or a multiple of a number; rows beyond them are cut off.

        Raises: InputError; the file cannot be read or written.
        """
        with files.reading(self.path, "remove it"):
            first, *lines = files.read(self.path).splitlines(keepends=True) or [b""]
        if first == self._asked:
            whole = sum(line.endswith(b"\n") for line in lines)
            count = whole if whole == total else whole // multiple * multiple
            with files.readable_errors(self.path):
                os.truncate(self.path, len(first) + sum(map(len, lines[:count])))
            return count
        if first:
            _log.warning(
                f"{self.path}: holds answers to another question, of other images or another checkpoint; "
                "they are made anew"
            )
        # In its place: the lock is on this very file.
        with files.readable_errors(self.path):
            os.truncate(self.path, 0)
        files.append(self.path, self._asked)
        return 0

    def append(self, rows: Iterable[Row]) -> None:
        """Add the rows of the images that follow. Raises: InputError."""
        files.append(self.path, b"".join(map(_line, rows)))

    def rows(self) -> Iterator[Row]:
        """All rows, in their order. Raises: InputError; the file was changed meanwhile."""
        with files.reading(self.path, "predict again"), files.open_regular(self.path) as file:
            next(file)
            for number, line in enumerate(file, 2):
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or row.keys() != self._columns:
                    shown = line[:60].decode(errors="replace").strip()
                    raise InputError(f"{self.path}:{number}: no row of predictions: {shown!r}; remove the file")
                yield row

    def remove(self) -> None:
        """The rows have become a file. Raises: InputError."""
        files.remove(self.path)


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()
