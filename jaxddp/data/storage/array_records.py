"""Images that are records of ArrayRecord files, found by their number in the file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.data.storage.records import missing_files
from jaxddp.data.storage.store import Fault
from jaxddp.errors import InputError

_AGAIN = "make the files again"


@dataclass(frozen=True)
class ArrayRecords:
    """ArrayRecord files below a directory. An offset is a record's number in its file."""

    root: Path
    source: Any
    """The serialized Examples of all files, by number; several threads may ask at once."""
    first: Mapping[bytes, int]
    """The number in the source of each file's first record."""
    feature: str = "image"
    """Which feature of a record is the encoded image."""

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.root / os.fsdecode(path)}, record {offset}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        return self._value(path, offset, self.feature, "bytes_list")

    # TensorFlow does not read ArrayRecord files.
    def in_graph(self) -> None: ...

    def labels(self, path: bytes, length: int, feature: str) -> tuple[np.ndarray, np.ndarray]:
        """The offset and an integer feature of each record of a file, int64[length] each. Raises: InputError."""
        return np.arange(length), np.array([self._value(path, row, feature, "int64_list") for row in range(length)])

    def faults(self, paths: np.ndarray) -> list[Fault]:
        return missing_files(self.root, paths)

    def _value(self, path: bytes, offset: int, feature: str, kind: str) -> Any:
        """The first value of a feature."""
        # Where there are ArrayRecord files there is TensorFlow, but it takes seconds to import.
        from google.protobuf.message import DecodeError

        from jaxddp.data.tensorflow_cpu import tf

        try:
            example = tf.train.Example.FromString(self._record(path, offset))
        except DecodeError:
            raise InputError(f"{self.name(path, offset)}: no serialized Example; {_AGAIN}") from None
        values = getattr(example.features.feature[feature], kind).value
        if not values:
            raise InputError(f"{self.name(path, offset)}: no value of the feature {feature!r}; {_AGAIN}")
        return values[0]

    def _record(self, path: bytes, offset: int) -> bytes:
        try:
            return self.source[self.first[path] + offset]
        # The reader, which is written in C++, raises it for everything that is wrong with a file.
        except RuntimeError as error:
            raise InputError(f"{self.name(path, offset)}: cannot be read ({error}); {_AGAIN}") from None
