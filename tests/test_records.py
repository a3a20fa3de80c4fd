"""Random access to TFRecord files: every record and label is found, and damage raises a one-line error."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.images import encode
from support.streams import waves

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.files import CACHE_VARIABLE
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.storage.records import RecordFiles, RecordIndex, load_or_build_index, record_offsets
from jaxddp.data.stream.tensorflow_cpu import tf
from jaxddp.data.table import ExampleTable

HEAD, TAIL = 12, 4
SIZE, NUM_EXAMPLES = 16, 6
DATA = DataConfig(image_size=SIZE, resize=SIZE, crop="whole")


def write_records(file: Path, records: list[bytes]) -> Path:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for record in records:
            writer.write(record)
    return file


def serialized(**values: bytes | int | float | list) -> bytes:
    """Return a serialized tf.train.Example."""
    features = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if items and isinstance(items[0], bytes):
            features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=items))
        elif items and isinstance(items[0], float):
            features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=items))
        else:
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=items))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def masked_checksum(data: bytes) -> int:
    """Return the masked CRC-32C of TFRecord files, computed bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def header(length: int) -> bytes:
    """Return a valid header of a record of this length."""
    number = struct.pack("<Q", length)
    return number + struct.pack("<I", masked_checksum(number))


@pytest.fixture
def table(tmp_path: Path) -> ExampleTable:
    """Return a table of `waves` in two files; each record also holds a note."""
    images = [encode(waves(row, SIZE, SIZE), "PNG") for row in range(NUM_EXAMPLES)]
    records = [serialized(image=image, label=row % 3, note=b"n" * 99) for row, image in enumerate(images)]
    files = [write_records(tmp_path / f"{part}.tfrecord", records[part::2]) for part in range(2)]
    path = np.array([f"{row % 2}.tfrecord".encode() for row in range(NUM_EXAMPLES)])
    offset = np.stack([record_offsets(file) for file in files], axis=1).ravel()
    names = np.array([str(row).encode() for row in range(NUM_EXAMPLES)])
    label = (np.arange(NUM_EXAMPLES) % 3).astype(np.int32)
    return ExampleTable(RecordFiles(tmp_path), names, path, label, ("a", "b", "c"), ("a", "b", "c"), (0, 1, 2), offset)


def root_of(table: ExampleTable) -> Path:
    assert isinstance(table.store, RecordFiles)
    return table.store.root


def batches_of(table: ExampleTable) -> list:
    return list(table.train_batches(SampleOrder(len(table), 2, seed=3), DATA, range(3)))


def change(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as data:
        data.seek(at)
        data.write(content)


@given(records=st.lists(st.binary(max_size=300), max_size=12))
def test_record_offsets_are_the_positions_of_the_written_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
):
    file = write_records(tmp_path_factory.mktemp("records") / "some", records)
    offsets = record_offsets(file)
    assert offsets.dtype == np.int64
    lengths = [HEAD + len(record) + TAIL for record in records]
    assert offsets.tolist() == [sum(lengths[:row]) for row in range(len(records))]
    content = file.read_bytes()
    contents = [
        content[position + HEAD : position + HEAD + len(record)]
        for position, record in zip(offsets, records, strict=True)
    ]
    assert contents == records


VALUES = st.one_of(
    st.binary(max_size=40),
    st.binary(min_size=2000, max_size=5000),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.binary(max_size=5), max_size=3),
    st.floats(width=32, allow_nan=False),
)


# Some names have as many characters as "label" or "image".
NAMES = st.one_of(st.sampled_from(["Label", "label2", "imago", "lab", ""]), st.text(max_size=6))
LABELS = st.one_of(st.sampled_from([-1, 0, 999, -(2**63), 2**63 - 1]), st.integers(0, 10**6))


@given(others=st.dictionaries(NAMES, VALUES, max_size=5), labels=st.lists(LABELS, min_size=1))
@example(others={"Label": 3, "imago": b"no", "label": 4}, labels=[-1, 7])
def test_a_label_is_found_among_other_features(
    tmp_path_factory: pytest.TempPathFactory, others: dict, labels: list[int]
):
    """The other features of a record, and their order, do not matter."""
    records = [serialized(**others | {"label": label, "image": b"picture %d" % label}) for label in labels]
    file = write_records(tmp_path_factory.mktemp("records") / "some", records)
    offsets, actual = RecordFiles(file.parent).labels(b"some", len(labels), "label")
    assert actual.tolist() == labels and offsets.tolist() == record_offsets(file).tolist()


def test_selected_rows_keep_their_records(table: ExampleTable):
    chosen = table.select("b,c")
    assert [chosen.read(row) for row in range(4)] == [table.read(row) for row in (1, 2, 4, 5)]
    assert chosen.fingerprint != table.fingerprint


def test_an_error_names_a_file_that_ends_within_a_record(tmp_path: Path):
    file = write_records(tmp_path / "some", [b"a" * 50, b"b" * 50])
    whole = file.read_bytes()
    for length in (*range(67, 132), 1, 11, 12, 65):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError, match=f"some: no complete record at byte {66 * (length > 66)} of "):
            record_offsets(file)


@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 2**64 - 1, 10**12, 117])
def test_a_forged_length_does_not_allocate(tmp_path: Path, length: int):
    """The checksum of the header is right, so TensorFlow would allocate as many bytes."""
    (tmp_path / "some").write_bytes(header(length) + b"x" * 120)
    with pytest.raises(InputError, match="some: no complete record at byte 0"):
        record_offsets(tmp_path / "some")
    with pytest.raises(InputError, match="some: no complete record at byte 0"):
        RecordFiles(tmp_path).read(b"some", 0)


FAULTS = {
    "checksum of the image": (lambda at: at + 60, b"\xff\xfe\xfd", "damaged, its checksum is wrong"),
    "header": (lambda at: at + 9, b"\x00\x00\x00", "damaged, its checksum is wrong"),
    "length": (lambda at: at, b"\xff" * 8, "no complete record at byte"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_an_error_names_a_damaged_record(table: ExampleTable, kind: str):
    """Both the store and the stream name the record, wherever in the record the damage is."""
    position, content, message = FAULTS[kind]
    assert table.offset is not None
    change(root_of(table) / "0.tfrecord", position(int(table.offset[2])), content)
    with pytest.raises(InputError, match=message) as raised:
        table.read(2)
    with pytest.raises(InputError) as streamed:
        batches_of(table)
    assert str(streamed.value) == str(raised.value)
    assert str(raised.value).startswith(str(root_of(table) / "0.tfrecord")) and "\n" not in str(raised.value)
    assert len(table.read(4)) and len(table.read(1))


def test_damage_beside_the_image_is_found_by_the_stream(table: ExampleTable):
    assert table.offset is not None
    file = root_of(table) / "1.tfrecord"
    change(file, int(table.offset[1]) + file.read_bytes()[int(table.offset[1]) :].index(b"nnnn"), b"N")
    with pytest.raises(InputError, match="1.tfrecord, record at byte 0: damaged, its checksum is wrong"):
        batches_of(table)


@pytest.mark.parametrize("offset", [3, -1, 2**62])
def test_an_invalid_offset_raises_a_one_line_error(table: ExampleTable, offset: int):
    assert table.offset is not None
    table.offset[2] = offset
    with pytest.raises(InputError, match=r"0\.tfrecord") as raised:
        batches_of(table)
    assert "\n" not in str(raised.value)


def test_an_error_names_a_record_without_the_feature(table: ExampleTable, tmp_path: Path):
    only = table.select("a").take(1)
    for record in (serialized(image=[b"a", b"b"]), serialized(image=3), b"no example", serialized(label=1)):
        write_records(tmp_path / "0.tfrecord", [record])
        with pytest.raises(InputError, match="record at byte 0: holds no single value of the feature 'image'"):
            only.read(0)
        with pytest.raises(InputError, match="record at byte 0: no value of the feature 'no'|no serialized Example"):
            RecordFiles(tmp_path).labels(b"0.tfrecord", 1, "no")
    with pytest.raises(InputError, match="record at byte 0: holds no single value of the feature 'image'"):
        list(only.eval_batches(EvalOrder(1, 1), DATA))


def test_missing_files_are_found_by_the_check_and_by_the_stream(table: ExampleTable):
    (root_of(table) / "1.tfrecord").unlink()
    with pytest.raises(InputError, match=r"1\.tfrecord.*\(3 of 6 images cannot be used\)"):
        table.check(DATA)
    with pytest.raises(InputError, match=r"1\.tfrecord: cannot be read \(No such file"):
        batches_of(table)
    with pytest.raises(InputError, match=r"1\.tfrecord: cannot be read \(No such file"):
        record_offsets(root_of(table) / "1.tfrecord")


class CountedBuild:
    """A function that builds an index and counts its calls."""

    def __init__(self):
        self.count = 0

    def __call__(self) -> RecordIndex:
        self.count += 1
        return RecordIndex(np.array([0, 40, 0]), np.array([7, 8, 9], np.int32))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for name in ("a", "b"):
        (tmp_path / "set" / name).write_bytes(b"content")
    return tmp_path / "set"


def test_an_index_is_built_once(folder: Path):
    build = CountedBuild()
    indices = [load_or_build_index("train", folder, ("a", "b"), "label", build) for _ in range(3)]
    assert build.count == 1
    for index in indices:
        assert [index.offset.tolist(), index.label.tolist()] == [[0, 40, 0], [7, 8, 9]]
        assert index.label.dtype == np.int32
    assert sorted(os.listdir(folder)) == ["a", "b", "train.jaxddp-index"]
    load_or_build_index("val", folder, ("a",), "label", build)
    load_or_build_index("train", folder, ("a", "b"), "label", build)
    assert build.count == 2


@pytest.mark.parametrize("changed", ["size", "time", "files", "feature"])
def test_a_changed_set_is_indexed_anew(folder: Path, changed: str):
    build = CountedBuild()
    load_or_build_index("train", folder, ("a", "b"), "label", build)
    status = (folder / "b").stat()
    if changed == "size":
        (folder / "b").write_bytes(b"longer content")
        os.utime(folder / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    elif changed == "time":
        os.utime(folder / "b", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    files, feature = (("a",) if changed == "files" else ("a", "b")), ("other" if changed == "feature" else "label")
    load_or_build_index("train", folder, files, feature, build)
    assert build.count == 2
    load_or_build_index("train", folder, files, feature, build)
    assert build.count == 2


def test_a_damaged_index_is_built_anew(folder: Path):
    build = CountedBuild()
    load_or_build_index("train", folder, ("a", "b"), "label", build)
    index_file = folder / "train.jaxddp-index"
    whole = index_file.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 37)]
    damaged = [b"", b"\x93NUMPY", whole[:-1], whole[: len(whole) // 2], whole + b"x", os.urandom(500), *flipped]
    for content in damaged:
        index_file.write_bytes(content)
        load_or_build_index("train", folder, ("a", "b"), "label", build)
        assert index_file.read_bytes() == whole
    assert build.count == 1 + len(damaged)


def test_the_index_of_a_read_only_data_set_is_written_to_the_cache(folder: Path, tmp_path: Path):
    build = CountedBuild()
    # The user root may write despite a read-only mode, so a folder takes the path of the index.
    (folder / "train.jaxddp-index").mkdir()
    for _ in range(2):
        load_or_build_index("train", folder, ("a", "b"), "label", build)
    assert build.count == 1
    assert [file.name.endswith("-train.jaxddp-index") for file in (tmp_path / "cache").iterdir()] == [True]
    assert sorted(os.listdir(folder)) == ["a", "b", "train.jaxddp-index"]


def test_an_index_that_cannot_be_written_is_built_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    build = CountedBuild()
    (folder / "train.jaxddp-index").mkdir()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file/cache"))
    for _ in range(2):
        assert len(load_or_build_index("train", folder, ("a", "b"), "label", build).label) == 3
    assert build.count == 2
    assert [CACHE_VARIABLE in record.getMessage() for record in caplog.records] == [True, True]


def test_an_error_names_a_missing_file_even_if_an_index_exists(folder: Path):
    build = CountedBuild()
    load_or_build_index("train", folder, ("a", "b"), "label", build)
    (folder / "b").unlink()
    with pytest.raises(InputError, match=r"set/b: cannot be read \(No such file"):
        load_or_build_index("train", folder, ("a", "b"), "label", build)
    assert build.count == 1


def test_another_process_may_write_the_index_at_the_same_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One process writes and renames the index between the write and the rename of another process."""
    build, plain_replace = CountedBuild(), os.replace

    def replace_after_another_process(*names) -> None:
        monkeypatch.setattr(os, "replace", plain_replace)
        load_or_build_index("train", folder, ("a", "b"), "label", build)
        plain_replace(*names)

    monkeypatch.setattr(os, "replace", replace_after_another_process)
    load_or_build_index("train", folder, ("a", "b"), "label", build)
    assert build.count == 2 and not (tmp_path / "cache").exists()
    load_or_build_index("train", folder, ("a", "b"), "label", build)
    assert build.count == 2 and sorted(os.listdir(folder)) == ["a", "b", "train.jaxddp-index"]
