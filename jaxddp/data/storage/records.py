"""Images that are records of TFRecord files, found by the offset of each record.

A record is its length (8 bytes, little-endian), a checksum of these (4), the data, and a checksum of it (4); the data
is a tf.train.Example, one feature of which is the encoded image.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxddp.data.storage.example_fields import Read, integer_of
from jaxddp.data.storage.local import LocalFiles
from jaxddp.data.storage.store import Fault, InGraph
from jaxddp.errors import InputError

AGAIN = "make the files again, or remove the index of them"

_HEAD, _TAIL = 12, 4
# Reading this much of a record usually finds every field but the image.
_LOOK = 1024


@dataclass(frozen=True)
class RecordFiles:
    """TFRecord files below a directory; a feature of each record is the encoded image."""

    root: Path
    feature: str = "image"

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.root / os.fsdecode(path)}, record at byte {offset}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        # It takes seconds to import, and only reading single records needs it.
        from jaxddp.data.tensorflow_cpu import tf

        file, name = self.root / os.fsdecode(path), self.name(path, offset)
        with _opened(file) as records:
            # TensorFlow allocates whatever length a header claims, so it is compared with the file's size first.
            _end(records, offset, file)
        try:
            return _image_reader(self.feature)(os.fsencode(file), offset).numpy()
        except tf.errors.DataLossError:
            raise InputError(f"{name}: damaged, its checksum is wrong; {AGAIN}") from None
        except tf.errors.InvalidArgumentError:
            raise InputError(f"{name}: holds no single value of the feature {self.feature!r}; {AGAIN}") from None

    def in_graph(self) -> InGraph:
        files = LocalFiles(self.root)
        return InGraph(
            lambda paths, offsets: (files.locate(paths), offsets), partial(record_image, feature=self.feature)
        )

    def labels(self, path: bytes, length: int, feature: str) -> tuple[np.ndarray, np.ndarray]:
        """The offset and an integer feature of each record of a file, int64[length] each. Raises: InputError."""
        file = self.root / os.fsdecode(path)
        offsets = record_offsets(file)
        if len(offsets) != length:
            raise InputError(f"{file}: {len(offsets)} records, where the set's description has {length}; {AGAIN}")
        return offsets, record_integers(file, offsets, feature)

    def faults(self, paths: np.ndarray) -> list[Fault]:
        return missing_files(self.root, paths)


def record_image(path: Any, offset: Any, feature: str) -> Any:
    """The image of the record at a byte of a TFRecord file, in TensorFlow's graph: a string scalar.

    One record is read, and its checksums are checked. An error of TensorFlow's says that there is no whole record, or
    no such feature in it.
    """
    from jaxddp.data.tensorflow_cpu import tf

    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], compression_type="", buffer_size=0, byte_offsets=offset[None]
    )
    kinds: dict[str, Any] = {"output_types": [tf.string], "output_shapes": [[]]}
    first = tf.raw_ops.TakeDataset(input_dataset=records, count=1, **kinds)
    (serialized,) = tf.raw_ops.DatasetToSingleElement(dataset=first, **kinds)
    parsed = tf.io.parse_single_example(serialized, {feature: tf.io.FixedLenFeature([], tf.string)})
    return parsed[feature]


def record_offsets(file: Path) -> np.ndarray:
    """Where each record of a file begins, int64[N], from the records' headers alone. Raises: InputError."""
    offsets, offset = [], 0
    with _opened(file) as records:
        size = os.fstat(records.fileno()).st_size
        while offset < size:
            offsets.append(offset)
            offset = _end(records, offset, file)
    return np.array(offsets, np.int64)


def record_integers(file: Path, offsets: np.ndarray, feature: str) -> np.ndarray:
    """An integer feature of each record, int64[N], read without the records' images; see `record_offsets`.

    Raises:
        InputError: the file cannot be read, or a record holds no such feature.
    """
    values = np.empty(len(offsets), np.int64)
    with _opened(file) as records:
        look = _looking(records)
        ends = np.append(offsets[1:], os.fstat(records.fileno()).st_size)
        for row, (offset, end) in enumerate(zip(offsets.tolist(), ends.tolist(), strict=True)):

            def read(start: int, stop: int, data: int = offset + _HEAD) -> bytes:
                return look(data + start, data + stop)

            try:
                values[row] = integer_of(read, end - offset - _HEAD - _TAIL, feature)
            except (OSError, ValueError) as error:
                raise InputError(f"{file}, record at byte {offset}: {error}; {AGAIN}") from None
    return values


def missing_files(root: Path, paths: np.ndarray) -> list[Fault]:
    """The rows of bytes 'S'[N] whose file, one of many rows, is missing, empty or outside the root."""
    files, inverse = np.unique(paths, return_inverse=True)
    # `LocalFiles` takes each file for an image.
    wrong = {files[place]: fault.replace("the image", "its file") for place, fault in LocalFiles(root).faults(files)}
    return [(row, wrong[files[place]]) for row, place in enumerate(inverse) if files[place] in wrong]


def _end(records: BinaryIO, offset: int, file: Path) -> int:
    """Where the record at an offset ends, by its header."""
    try:
        size = os.fstat(records.fileno()).st_size
        records.seek(offset)
        head = records.read(_HEAD)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {AGAIN}") from None
    length = struct.unpack("<Q", head[:8])[0] if len(head) == _HEAD else size
    end = offset + _HEAD + length + _TAIL
    if end > size:
        raise InputError(f"{file}: no whole record at byte {offset}, where {size} bytes end; {AGAIN}")
    return end


def _looking(file: BinaryIO) -> Read:
    """Reads nearby parts of a file with few system calls."""
    held, begin = b"", 0

    def look(start: int, stop: int) -> bytes:
        nonlocal held, begin
        if not begin <= start <= stop <= begin + len(held):
            file.seek(start)
            held, begin = file.read(max(_LOOK, stop - start)), start
        return held[start - begin : stop - begin]

    return look


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {AGAIN}") from None


@cache
def _image_reader(feature: str) -> Callable[[bytes, int], Any]:
    from jaxddp.data.tensorflow_cpu import tf

    signature = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)]
    return tf.function(lambda path, offset: record_image(path, offset, feature), input_signature=signature)
