"""Random access to TFRecord files: every record and label is found, and damage raises a one-line error."""

import os
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import error_line
from support.images import encode
from support.streams import waves

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.files import CACHE_VARIABLE
from jaxddp.data.faults import raise_fault
from jaxddp.data.order import SampleOrder
from jaxddp.data.storage.shards import Columns, Example, RecordFiles, load_or_build_index, records_of, write_example
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

HEAD, TAIL = 12, 4
SIZE, NUM_EXAMPLES = 16, 6
DATA = DataConfig(image_size=SIZE, resize=SIZE, crop="whole")


def write_records(file: Path, records: list[bytes]) -> Path:
    file.write_bytes(b"".join(header(len(each)) + each + masked_checksum(each) for each in records))
    return file


def serialized(**values: bytes | int | float | list) -> bytes:
    """Return a serialized tf.train.Example."""
    kinds = {bytes: "bytes_list", float: "float_list", int: "int64_list"}
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    features = {name: {kinds[type(items[0])]: {"value": items}} for name, items in lists.items()}
    return Example(features={"feature": features}).SerializeToString()


def masked_checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def header(length: int) -> bytes:
    """Return a valid header of a record of this length."""
    number = struct.pack("<Q", length)
    return number + masked_checksum(number)


@pytest.fixture
def table(tmp_path: Path) -> ExampleTable:
    """Return a table of `waves` in two files; each record also holds a note."""
    images = [encode(waves(row, SIZE, SIZE), "PNG") for row in range(NUM_EXAMPLES)]
    records = [serialized(image=image, label=row % 3, note=b"n" * 99) for row, image in enumerate(images)]
    files = [write_records(tmp_path / f"{part}.tfrecord", records[part::2]) for part in range(2)]
    path = np.array([f"{row % 2}.tfrecord".encode() for row in range(NUM_EXAMPLES)])
    offset = np.array([[start for start, _ in records_of(file)] for file in files]).T.ravel()
    names = np.array([str(row).encode() for row in range(NUM_EXAMPLES)])
    label = (np.arange(NUM_EXAMPLES) % 3).astype(np.int32)
    return ExampleTable(RecordFiles(LocalFiles(tmp_path)), names, path, label, ("a", "b", "c"), offset=offset)


def batches_of(table: ExampleTable) -> list:
    return list(table.train_batches(SampleOrder(len(table), 2, seed=3), DATA, range(3)))


@given(records=st.lists(st.binary(max_size=300), max_size=12))
def test_record_offsets_are_the_positions_of_the_written_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
):
    file = write_records(tmp_path_factory.mktemp("records") / "some", records)
    offsets = [offset for offset, _ in records_of(file)]
    lengths = [HEAD + len(record) + TAIL for record in records]
    assert offsets == [sum(lengths[:row]) for row in range(len(records))]
    content = file.read_bytes()
    for position, record in zip(offsets, records, strict=True):
        assert content[position + HEAD : position + HEAD + len(record)] == record


@pytest.mark.slow
@given(records=st.lists(st.dictionaries(st.text(), st.binary() | st.integers(-(2**63), 2**63 - 1)), max_size=3))
def test_tensorflow_writes_and_reads_the_same_records(tmp_path_factory: pytest.TempPathFactory, records: list[dict]):
    import tensorflow as tf

    folder, examples = tmp_path_factory.mktemp("records"), []
    with (folder / "ours").open("wb") as ours, tf.io.TFRecordWriter(str(folder / "tensorflow")) as writer:
        for values in records:
            write_example(ours, values)
            examples.append(tf.train.Example(features=tf.train.Features()))
            for name, value in values.items():
                feature = examples[-1].features.feature[name]
                (feature.bytes_list if isinstance(value, bytes) else feature.int64_list).value.append(value)
            writer.write(examples[-1].SerializeToString(deterministic=True))
    assert (folder / "ours").read_bytes() == (folder / "tensorflow").read_bytes()
    read = tf.data.TFRecordDataset(str(folder / "ours")).as_numpy_iterator()
    assert [*map(tf.train.Example.FromString, read)] == examples


OTHERS = {"Label": 3, "imago": b"no", "lab": [2**63 - 1, -5], "": 0.5, "image": b"picture" * 999}


@given(names=st.permutations([*OTHERS]), labels=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_a_label_is_found_among_other_features(tmp_path_factory: pytest.TempPathFactory, names: list, labels: list):
    """The other features of a record, and their order, do not matter."""
    records = [serialized(**{name: OTHERS[name] for name in names}, label=label) for label in labels]
    file = write_records(tmp_path_factory.mktemp("records") / "some", records)
    offsets, actual = RecordFiles(LocalFiles(file.parent)).labels("some", len(labels), "label")
    assert actual.tolist() == labels and offsets.tolist() == [offset for offset, _ in records_of(file)]


def test_selected_rows_keep_their_records_and_missing_files_are_found(table: ExampleTable, tmp_path: Path):
    chosen = table.select("b,c")
    assert [chosen.read(row) for row in range(4)] == [table.read(row) for row in (1, 2, 4, 5)]
    assert chosen.fingerprint != table.fingerprint
    (tmp_path / "1.tfrecord").unlink()
    with pytest.raises(InputError, match=r"1\.tfrecord.*\(3 of 6 images cannot be used\)"):
        table.check(DATA)
    with pytest.raises(InputError, match=r"1\.tfrecord: cannot be read \(No such file"):
        batches_of(table)


def test_an_error_names_a_record_with_a_changed_byte_or_a_length_beyond_the_end(tmp_path: Path):
    whole = write_records(tmp_path / "some", [b"a" * 50, b"b" * 50]).read_bytes()
    cut = [(whole[:length], 66 * (length > 66)) for length in (1, 12, 67, 131)]
    for content, at in (*cut, *((header(length) + b"x" * 120, 0) for length in (2**64 - 1, 117))):
        (tmp_path / "some").write_bytes(content)
        with pytest.raises(InputError, match=f"some: no complete record at byte {at} of "):
            list(records_of(tmp_path / "some"))
        with pytest.raises(InputError, match=f"some: no complete record at byte {at}"):
            RecordFiles(LocalFiles(tmp_path)).read(b"some", at)
    for at in range(66):
        (tmp_path / "some").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InputError, match="record at byte 0: damaged, its checksum is|no complete record at byte 0"):
            RecordFiles(LocalFiles(tmp_path)).read(b"some")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "content", "message"),
    [(60, b"\xff\xfe\xfd", "damaged, its checksum is wrong"), (0, b"\xff" * 8, "no complete record at byte")],
)
def test_an_error_names_a_damaged_record(table: ExampleTable, tmp_path: Path, at: int, content: bytes, message: str):
    """Both the store and the stream name the record."""
    with (tmp_path / "0.tfrecord").open("r+b") as data:
        data.seek(int(table.offset[2]) + at)  # type: ignore[index]
        data.write(content)
    with pytest.raises(InputError, match=message) as raised:
        table.read(2)
    assert error_line(batches_of, table) == str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "0.tfrecord")) and "\n" not in str(raised.value)
    assert len(table.read(4)) and len(table.read(1))


def test_an_error_names_a_record_without_the_feature(table: ExampleTable, tmp_path: Path):
    only = table.select("a").take(1)
    for record in (b"no example", serialized(image=[b"a", b"b"], no=[1, 2]), serialized(image=3), serialized(label=1)):
        write_records(tmp_path / "0.tfrecord", [record])
        fault = "no serialized Example" if record == b"no example" else "holds no single value of the feature "
        with pytest.raises(InputError, match=f"record at byte 0: {fault}('image')?;"):
            only.read(0)
        with pytest.raises(InputError, match=f"record at byte 0: {fault}('no')?;"):
            RecordFiles(LocalFiles(tmp_path)).labels("0.tfrecord", 1, "no")


class Index:
    """An index of the files "a" and "b" in a folder, which counts how often a file is read."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0

    def __call__(self, name: str = "train", paths: tuple[str, ...] = ("a", "b"), about: str = "label") -> list[Any]:
        columns = load_or_build_index(name, LocalFiles(self.folder), paths, about, self.read, raise_fault)
        return [(path, part["label"].tolist(), part["label"].dtype) for path, part in columns.items()]

    def read(self, path: str, size: int) -> tuple[Columns, list[str]]:
        self.count += 1
        return {"offset": np.arange(2), "label": np.array([ord(path), size], np.int32)}, []


@pytest.fixture
def index(tmp_path: Path, own_cache: None) -> Index:
    (tmp_path / "set").mkdir()
    for name in ("a", "b"):
        (tmp_path / "set" / name).write_bytes(b"content")
    return Index(tmp_path / "set")


def test_an_index_is_built_once_and_does_not_hide_a_missing_file(index: Index):
    assert [index() for _ in range(3)] == [[("a", [97, 7], np.int32), ("b", [98, 7], np.int32)]] * 3
    assert index.count == 2 and sorted(os.listdir(index.folder)) == ["a", "b", "train.jaxddp-index"]
    index("val", ("a",))
    index()
    assert index.count == 3
    (index.folder / "b").unlink()
    with pytest.raises(InputError, match=r"set/b: no such file; download it again"):
        index()


@pytest.mark.parametrize("changed", ["size", "time", "files", "about"])
def test_a_changed_set_is_indexed_anew(index: Index, changed: str):
    index()
    file, before = index.folder / "b", index.count
    status = file.stat()
    if changed == "size":
        file.write_bytes(b"longer content")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + (changed == "time")))
    arguments = {"files": ("train", ("a",)), "about": ("train", ("a", "b"), "other")}.get(changed, ())
    index(*arguments)
    assert index.count > before
    after = index.count
    index(*arguments)
    assert index.count == after


def test_a_damaged_index_is_built_anew(index: Index):
    index()
    file = index.folder / "train.jaxddp-index"
    whole = file.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 97)]
    damaged = [b"", whole[:-1], whole + b"x", os.urandom(500), *flipped]
    for content in damaged:
        file.write_bytes(content)
        index()
        assert file.read_bytes() == whole
    assert index.count == 2 * (1 + len(damaged))


def test_an_index_is_written_to_the_cache_or_nowhere(index: Index, tmp_path: Path, monkeypatch, caplog):
    # The user root may write despite a read-only mode, so a folder takes the path of the index.
    (index.folder / "train.jaxddp-index").mkdir()
    for _ in range(2):
        index()
    assert index.count == 2
    assert len([*(tmp_path / "cache").glob("*-train.jaxddp-index")]) == 1
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file/cache"))
    for _ in range(2):
        assert len(index()) == 2
    assert index.count == 6
    assert [CACHE_VARIABLE in record.getMessage() for record in caplog.records] == [True, True]
