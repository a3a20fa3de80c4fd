"""Images that are records of TFRecord files, found by the offset of each record.

A record is its length (8 bytes, little-endian), a checksum of these (4), the data, and a checksum of it (4); the data
is a tf.train.Example, one feature of which is the encoded image.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxddp.data.storage.local import LocalFiles
from jaxddp.data.storage.store import Fault
from jaxddp.errors import InputError

_HEAD, _TAIL = 12, 4
_AGAIN = "make the files again, or remove the index beside them"


@dataclass(frozen=True)
class RecordFiles:
    """TFRecord files below a directory.

    Attributes:
        feature: which feature of a record is the encoded image.
    """

    root: Path
    feature: str = "image"

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.root / os.fsdecode(path)}, record at byte {offset}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        # It takes seconds to import, and only those who look at single records need it here.
        from jaxddp.data.tensorflow_cpu import tf

        example = tf.train.Example.FromString(read_record(self.root / os.fsdecode(path), offset))
        values = example.features.feature[self.feature].bytes_list.value
        if len(values) != 1:
            raise InputError(f"{self.name(path, offset)}: {len(values)} values of {self.feature!r}, not one; {_AGAIN}")
        return values[0]

    def faults(self, paths: np.ndarray) -> list[Fault]:
        files, inverse = np.unique(paths, return_inverse=True)
        wrong = {files[place]: fault for place, fault in LocalFiles(self.root).faults(files)}
        return [(row, wrong[files[place]]) for row, place in enumerate(inverse) if files[place] in wrong]


def read_record(file: Path, offset: int) -> bytes:
    """The data of the record at an offset, in bytes.

    Raises:
        InputError: the file cannot be read, or holds no whole record there.
    """
    try:
        with file.open("rb") as records:
            records.seek(offset)
            head = records.read(_HEAD)
            length = struct.unpack("<Q", head[:8])[0] if len(head) == _HEAD else -1
            # A forged length must not ask for more memory than there is file.
            if 0 <= length <= os.fstat(records.fileno()).st_size - offset - _HEAD - _TAIL:
                return records.read(length)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {_AGAIN}") from None
    raise InputError(f"{file}: no whole record at byte {offset}; {_AGAIN}")


def record_offsets(file: Path) -> np.ndarray:
    """Where each record of a file begins, int64[N], from the records' headers alone.

    Raises:
        InputError: the file cannot be read, or ends within a record.
    """
    offsets, offset = [], 0
    try:
        with file.open("rb") as records:
            size = os.fstat(records.fileno()).st_size
            while offset < size:
                head = records.read(_HEAD)
                length = struct.unpack("<Q", head[:8])[0] if len(head) == _HEAD else size
                following = offset + _HEAD + length + _TAIL
                if following > size:
                    raise InputError(f"{file}: ends within the record at byte {offset}; {_AGAIN}")
                offsets.append(offset)
                offset = records.seek(following)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {_AGAIN}") from None
    return np.array(offsets, np.int64)
