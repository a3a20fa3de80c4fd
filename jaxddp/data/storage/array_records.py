"""Images that are records of ArrayRecord files, found by their number in the file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxddp.data.storage.example_fields import bytes_of, integer_of
from jaxddp.data.storage.records import missing_files
from jaxddp.data.storage.store import Fault
from jaxddp.errors import InputError

_AGAIN = "make the files again"


class Records(Protocol):
    """Serialized tf.train.Examples by number, through all files; several threads may ask at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> bytes: ...


@dataclass(frozen=True)
class ArrayRecords:
    """ArrayRecord files below a directory. An offset is a record's number in its file.

    Attributes:
        source: the records of all files.
        first: the number in the source of each file's first record.
        feature: which feature of a record is the encoded image.
    """

    root: Path
    source: Records
    first: Mapping[bytes, int]
    feature: str = "image"

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.root / os.fsdecode(path)}, record {offset}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        record = self._record(path, offset)
        try:
            return bytes_of(lambda start, stop: record[start:stop], len(record), self.feature)
        except ValueError as error:
            raise InputError(f"{self.name(path, offset)}: {error}; {_AGAIN}") from None

    def integer(self, path: bytes, offset: int, feature: str) -> int:
        """An integer feature of a record. Raises `InputError`, which names it, where there is none."""
        record = self._record(path, offset)
        try:
            return integer_of(lambda start, stop: record[start:stop], len(record), feature)
        except ValueError as error:
            raise InputError(f"{self.name(path, offset)}: {error}; {_AGAIN}") from None

    def faults(self, paths: np.ndarray) -> list[Fault]:
        return missing_files(self.root, paths)

    def _record(self, path: bytes, offset: int) -> bytes:
        try:
            return self.source[self.first[path] + offset]
        # What the reader, which is written in C++, says of everything that is wrong with a file.
        except RuntimeError as error:
            raise InputError(f"{self.name(path, offset)}: cannot be read ({error}); {_AGAIN}") from None
