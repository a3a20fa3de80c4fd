"""Large files that hold many images, in a folder on this machine or below a URL, and their indexes.

An index holds columns, such as the offset and the label, of every image of some files. It is saved next to the files
or, where that folder cannot be written, in the cache folder. It holds the size and the modification time of every file,
so changed files are indexed again. It also holds its own hash, so a damaged index is not used.

In a TFRecord file, a record is the length of the data (8 bytes, little-endian), a checksum of the length (4), the data,
and a checksum of the data (4). The offset of a record is the position of its first byte. In an ArrayRecord file, the
offset is the number of the record.
"""

import io
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, counted
from jaxddp.core.phases import doing, reached
from jaxddp.core.threads import map_in_threads
from jaxddp.data.faults import Refuse
from jaxddp.data.storage.root import Folder
from jaxddp.data.storage.store import LocalFiles, ShardStore, name_of_folder, read_sealed, write_sealed

Columns = Mapping[str, np.ndarray]
"""The columns of a file's images, by name."""
Contents = tuple[Columns, list[str]]
"""The columns of a file, and a message for each of its faults."""
_FORMAT = 2
_COUNT = "count"
# Reading labels mostly waits for the disk or a server.
THREADS = 16
_SECONDS = 3600.0
"""The longest wait for another process of this machine that indexes the same files; then this process indexes them."""
_log = logging.getLogger("jaxddp.data")
SHARDS = (".tar", ".parquet")


def split_address(address: str) -> tuple[str, str]:
    """Return (folder, pattern) of an address: the parts before and after the last slash that no pattern precedes.

    The pattern is empty if the address has neither `{`, `*` nor `?`, and does not end like a shard (.tar, .parquet).
    """
    special = min((at for sign in "{*?" if (at := address.find(sign)) >= 0), default=len(address))
    if special == len(address) and not address.lower().endswith(SHARDS):
        return address, ""
    folder, slash, _ = address[:special].rpartition("/")
    return folder or slash or ".", address[len(folder) + len(slash) :]


def load_or_build_index(
    name: str, folder: Folder, paths: Sequence[str], about: str, read: Callable[[str, int], Contents], refuse: Refuse
) -> dict[str, Columns]:
    """Return the columns of each file, by path, from an earlier run if no file has changed; otherwise read and save.

    If the columns cannot be saved, a warning is logged. With faults, they are not saved: faults are reported each time.

    Args:
        name: the name of the index; a folder may have several.
        about: a text with everything on which the columns depend, besides the files.
        read: a function of the path and the size of a file; an `InputError` is a fault, too.
        refuse: is called with each fault. A file that is missing or cannot be read is left out.

    Raises: InputError if `refuse` raises it, or no file can be used.
    """

    def state_of(path: str) -> tuple[int, str] | None:
        with suppress(FileNotFoundError):
            return folder.state(path)

    # A web server, which does not list its files, gets a request for each.
    found = dict(zip(paths, map_in_threads(state_of, paths, 1 if folder.can_list else THREADS), strict=True))
    for path in (path for path, state in found.items() if state is None):
        refuse(f"{folder.name(path)}: no such file; download it again, or correct its name")
    states = {path: state for path, state in found.items() if state is not None}
    stamp = json.dumps([_FORMAT, about, *states.items()])
    cached = files.cache_folder() / f"{name_of_folder(folder.root or folder.name())}-{name}.jaxddp-index"
    places = [cached] if folder.root is None else [folder.root / f"{name}.jaxddp-index", cached]

    def read_in_thread(path: str) -> tuple[Columns | None, list[str]]:
        try:
            with files.reading(folder.name(path), "make it a readable file"):
                return read(path, states[path][0])
        except InputError as error:
            return None, [str(error)]

    with files.in_turn(cached.with_suffix(".lock"), _SECONDS, "indexing the same files"):
        if (saved := next(filter(None, (_load(place, stamp) for place in places)), None)) is not None:
            ends = np.cumsum(saved[_COUNT])[:-1]
            parts = {column: np.split(values, ends) for column, values in saved.items() if column != _COUNT}
            return {path: {name: part[row] for name, part in parts.items()} for row, path in enumerate(states)}
        columns, has_faults = dict[str, Columns](), len(states) < len(paths)
        with doing(f"indexing {counted(len(states), 'file')}, once", len(states), "file"):
            results = map_in_threads(read_in_thread, states, THREADS)
            for done, (path, (part, faults)) in enumerate(zip(states, results, strict=True), 1):
                reached(done)
                has_faults |= bool(faults)
                for fault in faults:
                    refuse(fault)
                if part is not None:
                    columns[path] = part
        if not columns:
            raise InputError(f"{folder.name()}: none of {counted(len(paths), 'file')} can be used; repair one")
        if not has_faults:
            _save(places, stamp, [*columns.values()])
    return columns


def _load(place: Path, stamp: str) -> Columns | None:
    with suppress(OSError):
        if (content := read_sealed(place)) is not None:
            with np.load(io.BytesIO(content), allow_pickle=False) as saved:
                if saved["stamp"].item() == stamp:
                    return {name: saved[name] for name in saved.files if name != "stamp"}
    return None


def _save(places: Sequence[Path], stamp: str, parts: Sequence[Columns]) -> None:
    arrays: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays |= {"stamp": np.array(stamp), _COUNT: np.array([len(next(iter(part.values()))) for part in parts])}
    content = io.BytesIO()
    np.savez(content, **arrays)
    for place in places:
        try:
            return write_sealed(place, content.getvalue())
        except OSError as error:
            _log.debug("%s: cannot be written (%s)", place, error.strerror)
    advice = f"set {files.CACHE_VARIABLE} to a folder that can be written"
    _log.warning(f"{places[-1]}: the index cannot be saved and is built at each start; {advice}")


MAKE_OR_INDEX_AGAIN = "make the files again, or remove their index"
_HEAD, _TAIL = 12, 4
_LISTS = {bytes: "bytes_list", int: "int64_list"}


@dataclass(frozen=True)
class RecordFiles(ShardStore):
    """TFRecord files of a folder on this machine; one feature of each record is the encoded image."""

    folder: LocalFiles
    feature: str = "image"
    record = "record at byte"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        file, name = self.folder.name(path), self.name(path, offset)
        with files.reading(file, MAKE_OR_INDEX_AGAIN), files.open_regular(file, buffering=0) as records:
            # A damaged header may state any length. `_end` first compares it with the file size.
            end = _end(records, offset, file)
            # Reading all parts at once and copying the data out of them takes up to four times as long (110 kB).
            data = records.read(end - offset - _HEAD - _TAIL)
            around = os.pread(records.fileno(), _HEAD, offset), records.read(_TAIL)
        if around != _around(data):
            raise InputError(f"{name}: damaged, its checksum is wrong; {MAKE_OR_INDEX_AGAIN}")
        return _value(data, self.feature, "bytes_list", name)

    def labels(self, path: str, length: int, feature: str) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and an integer feature of all records of a file, int64[length] each. Raises: InputError."""
        file, labels = self.folder.name(path), dict[int, int]()
        for offset, data in records_of(file):
            labels[offset] = _value(data, feature, "int64_list", self.name(os.fsencode(path), offset))
        if len(labels) != length:
            raise InputError(f"{file}: {len(labels)} records in place of {length}; {MAKE_OR_INDEX_AGAIN}")
        return np.array([*labels], np.int64), np.array([*labels.values()], np.int64)


@dataclass(frozen=True)
class ArrayRecords(ShardStore):
    """ArrayRecord files of a folder on this machine. An offset is a record's number in its file."""

    folder: LocalFiles
    source: Any
    """The serialized Examples of all files, by number; threads may share it."""
    first: Mapping[bytes, int]
    """The number of each file's first record in `source`."""
    feature: str = "image"
    """The name of the feature with the encoded image."""
    record = "record"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        return self._value(path, offset, self.feature, "bytes_list")

    def labels(self, path: str, length: int, feature: str) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and an integer feature; see `RecordFiles.labels`."""
        file = os.fsencode(path)
        return np.arange(length), np.array([self._value(file, row, feature, "int64_list") for row in range(length)])

    def _value(self, path: bytes, offset: int, feature: str, kind: Literal["bytes_list", "int64_list"]) -> Any:
        name = self.name(path, offset)
        try:
            data = self.source[self.first[path] + offset]
        # The reader is written in C++ and raises RuntimeError for every fault of a file.
        except RuntimeError as error:
            raise InputError(f"{name}: cannot be read ({error}); {MAKE_OR_INDEX_AGAIN}") from None
        return _value(data, feature, kind, name)


def records_of(file: Path | str) -> Iterator[tuple[int, bytes]]:
    """Yield the first byte of each record of a TFRecord file, and its data. Raises: InputError."""
    offset = 0
    # Do not buffer: most reads are of a header, and megabytes follow each header.
    with files.reading(file, MAKE_OR_INDEX_AGAIN), files.open_regular(file, buffering=0) as records:
        while offset < os.fstat(records.fileno()).st_size:
            end = _end(records, offset, file)
            yield offset, records.read(end - offset - _HEAD - _TAIL)
            offset = end


def write_example(records: BinaryIO, values: Mapping[str, bytes | int]) -> None:
    """Append an Example, with one value of each feature, to a TFRecord file. Raises: OSError."""
    features = {name: {_LISTS[type(it)]: {"value": [it]}} for name, it in values.items()}
    data = Example(features={"feature": features}).SerializeToString(deterministic=True)
    head, tail = _around(data)
    records.writelines([head, data, tail])


def _around(data: bytes) -> tuple[bytes, bytes]:
    """Return what a TFRecord file holds before and after the data of a record."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length), _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of TFRecord files, 4 bytes."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _value(data: bytes, feature: str, kind: Literal["bytes_list", "int64_list"], name: str) -> Any:
    """Return the only value of a feature of a serialized Example. Raises: InputError."""
    try:
        values = getattr(Example.FromString(data).features.feature[feature], kind).value
    except DecodeError:
        raise InputError(f"{name}: no serialized Example; {MAKE_OR_INDEX_AGAIN}") from None
    if len(values) != 1:
        raise InputError(f"{name}: holds no single value of the feature {feature!r}; {MAKE_OR_INDEX_AGAIN}")
    return values[0]


_MESSAGES = (Path(__file__).parent / "example.textproto").read_text(encoding="utf-8")
# TensorFlow registers the same names in the default pool.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto()))
Example: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("tensorflow.Example"))
"""The class of tf.train.Example."""


def record_columns(paths: np.ndarray, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (id, path, number) for each record of several files, one file after the other.

    Args:
        paths: bytes 'S'[F], those of the files in the store.
        lengths: the number of records in each file.

    Returns: ids, bytes 'S'[N] such as train-00000.parquet__17; paths, bytes 'S'[N]; and the records' numbers in their
        files, int64[N].
    """
    path = np.repeat(paths, lengths)
    number = np.concatenate([np.arange(length) for length in lengths])
    return np.strings.add(np.strings.add(path, b"__"), number.astype("S")), path, number


def _end(records: BinaryIO, offset: int, file: Path | str) -> int:
    """Return the end of the record at an offset, from its header. The file position is then after the header."""
    size = os.fstat(records.fileno()).st_size
    records.seek(offset)
    head = records.read(_HEAD)
    length = struct.unpack("<Q", head[:8])[0] if len(head) == _HEAD else size
    end = offset + _HEAD + length + _TAIL
    if end > size:
        raise InputError(f"{file}: no complete record at byte {offset} of {size}; {MAKE_OR_INDEX_AGAIN}")
    return end
