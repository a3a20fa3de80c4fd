"""Predictions while they are made: a file of JSON lines beside the one to be written, so that they can go on.

OUT.partial     {"run": …, "step": …, "images": …, …}     what was asked
                {"id": "cat.jpg", "class": "cat", …}       a row for each image so far
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jaxddp.files as files
from jaxddp.errors import InputError
from jaxddp.experiment.predictions import Row

_log = logging.getLogger("jaxddp.predictions")


class Partial:
    """The rows that were answered so far, beside the file that they become.

    Args:
        asked: what tells this question from others; the answers to another one are begun anew.
    """

    def __init__(self, out: Path, asked: Mapping[str, str | int]):
        self.path = out.with_name(f"{out.name}.partial")
        self._asked = _line(asked)

    def resume(self, multiple: int, total: int) -> int:
        """How many images were answered before, all or a multiple of a number; rows beyond them are cut off.

        Raises: InputError; the file cannot be read or written.
        """
        kept, count = self._asked, 0
        if self.path.exists():
            with files.reading(self.path, "remove it"):
                first, *lines = files.read(self.path).splitlines(keepends=True) or [b""]
            if first == self._asked:
                whole = sum(line.endswith(b"\n") for line in lines)
                count = whole if whole == total else whole // multiple * multiple
                kept += b"".join(lines[:count])
            else:
                _log.warning(
                    f"{self.path}: holds answers to another question, of other images or another checkpoint; "
                    "they are made anew"
                )
        files.replace(self.path, kept)
        return count

    def append(self, rows: Iterable[Row]) -> None:
        """Add the rows of the images that follow. Raises: InputError."""
        files.append(self.path, b"".join(map(_line, rows)))

    def rows(self) -> Iterator[Row]:
        """All rows, in their order. Raises: InputError; the file was changed meanwhile."""
        with files.reading(self.path, "predict again"), files.open_regular(self.path) as file:
            next(file)
            for number, line in enumerate(file, 2):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"{self.path}:{number}: {error}; remove the file and predict again") from None

    def remove(self) -> None:
        """The rows have become a file. Raises: InputError."""
        files.remove(self.path)


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()
