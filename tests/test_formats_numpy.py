"""NumPy's files: arrays are read as saved, and memory-mapped from a folder; pickles are rejected."""

import io
import mmap
import pickle
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.data.formats.numpy_files import holds_numpy, read_numpy
from jaxddp.data.order import EvalOrder, SampleOrder, Shard

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
ARRAYS = {
    "train_images": IMAGES,
    "train_labels": np.array([0, 1, 2, 1, 0]),
    "val_images": IMAGES[:3, :, :, :1],
    "val_labels": np.array([3, 0, 1], np.uint8),
}
NAMES = np.array(["ant", "bee", "cat", "dög"])
KINDS = ("compressed npz", "folder")


def save(folder: Path, kind: str, arrays: dict) -> Path:
    if kind == "folder":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return folder
    write = np.savez if kind == "npz" else np.savez_compressed
    write(folder / "data.npz", **arrays)
    return folder / "data.npz"


def error_prefix(path: Path, name: str) -> str:
    return f"{path}: {name}: " if path.is_file() else f"{path / name}.npy: "


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_names", [False, True])
def test_both_splits_are_read(tmp_path, kind, has_names):
    assert not holds_numpy(tmp_path)
    published = dict(zip(("x_train", "y_train", "X_test", "y_test"), ARRAYS.values(), strict=True))
    published["y_test"] = published["y_test"][:, None]
    path = save(tmp_path, kind, ARRAYS | {"class_names": NAMES} if has_names else published)
    assert holds_numpy(path)
    for split in ("train", "val"):
        table = read_numpy(path, split)
        np.testing.assert_array_equal(table.images, ARRAYS[f"{split}_images"])
        np.testing.assert_array_equal(table.labels, ARRAYS[f"{split}_labels"])
        assert table.class_names == (("ant", "bee", "cat", "dög") if has_names else ("0", "1", "2", "3"))
        assert [type(name) for name in table.class_names] == [str] * 4


def test_images_have_the_labels_of_their_own_split(tmp_path):
    arrays = ARRAYS | {"test_images": IMAGES[:3], "test_labels": np.array([1, 1, 1])}
    del arrays["val_labels"]
    assert read_numpy(save(tmp_path, "npz", arrays), "val").images.shape == (3, 4, 6, 3)


@given(
    images=npst.arrays(np.uint8, npst.array_shapes(min_dims=4, max_dims=4, max_side=4)),
    kind=st.sampled_from(KINDS),
    column_major=st.booleans(),
    dtype=st.sampled_from(["<i8", ">i4", "u1", ">u2", "<u8"]),
    data=st.data(),
)
def test_the_saved_arrays_are_read_back(images, kind, column_major, dtype, data):
    labels = data.draw(npst.arrays(dtype, len(images), elements=st.integers(0, 7)))
    stored = np.asfortranarray(images) if column_major else images
    with tempfile.TemporaryDirectory() as name:
        path = save(Path(name), kind, {"train_images": stored, "train_labels": labels})
        table = read_numpy(path, "train")
        np.testing.assert_array_equal(table.images, images)
        np.testing.assert_array_equal(table.labels, labels)
        assert table.fingerprint == ArrayTable(images, labels, table.class_names).fingerprint


def test_images_in_a_folder_are_memory_mapped_and_give_the_same_batches(tmp_path):
    path = save(tmp_path, "folder", ARRAYS)
    table, memory = read_numpy(path, "train"), ArrayTable(IMAGES, ARRAYS["train_labels"], tuple("0123"))
    base = table.images
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap) and table.fingerprint == memory.fingerprint

    def batches(table: ArrayTable) -> list[Batch]:
        train = table.train_batches(SampleOrder(5, 4, seed=1), DataConfig(), range(3))
        return [*train, *table.eval_batches(EvalOrder(5, 4), DataConfig())]

    for mapped, loaded in zip(batches(table), batches(memory), strict=True):
        for leaf, expected in zip(mapped, loaded, strict=True):
            np.testing.assert_array_equal(leaf, expected)


def test_a_batch_of_a_four_gigabyte_file_reads_only_its_rows(tmp_path):
    """The file is sparse: rows that were never written take no space on the disk."""
    shape = (20_000, 256, 256, 3)
    images = np.lib.format.open_memmap(tmp_path / "train_images.npy", mode="w+", dtype=np.uint8, shape=shape)
    images[-1] = 7
    del images
    np.save(tmp_path / "train_labels.npy", np.arange(shape[0]) % 10)
    tracemalloc.start()
    try:
        table = read_numpy(tmp_path, "train")
        assert table.take(10**9).select(None) is table
        *_, last = table.eval_batches(EvalOrder(shape[0], 10_000), DataConfig(), Shard(4_999, 5_000))
        assert last.image.shape == (2, 256, 256, 3) and last.image[1].min() == last.image[1].max() == 7
        assert table.take(3).images.shape == (3, 256, 256, 3)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_images", IMAGES - 300.0, "images of float64 from .*: give floats from 0 to 1, or uint8 from 0 to 255"),
        ("train_images", IMAGES[..., 0, 0], r"images of shape \(5, 4\): give \[N, H, W, C\], with C = 1 for gray"),
        ("train_labels", np.zeros(4, int), r"labels of shape \(4,\) for 5 images: give one label per image"),
        ("train_labels", np.zeros(5), "labels of float64: give integers"),
        ("train_labels", np.array([0, -2, 2, 1, 0]), r"label -2 of row 1: 4 class names allow 0\.\.3"),
        ("class_names", np.array(["a", "b"], object), "holds pickled Python objects, which are never read; save"),
        ("class_names", np.arange(4), r"int64 of shape \(4,\): give strings, one per class"),
        ("class_names", NAMES[None], r"<U3 of shape \(1, 4\): give strings, one per class"),
        ("class_names", np.zeros(4, "V0"), r"\|V0 of shape \(4,\): neither numbers nor strings; save it again"),
    ],
)
def test_invalid_arrays_raise_a_one_line_error(tmp_path, kind, name, array, message):
    path = save(tmp_path, kind, ARRAYS | {"class_names": NAMES} | {name: array})
    with pytest.raises(InputError, match=message) as error:
        read_numpy(path, "train")
    assert str(error.value).startswith(error_prefix(path, name))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_for_a_missing_array_names_the_existing_ones(tmp_path, kind):
    path = save(tmp_path, kind, {"train_images": IMAGES, "train_label": np.zeros(5), "x": IMAGES})
    message = "no array 'train_labels'; did you mean 'train_label'[?] there are: train_images, train_label, x$"
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        read_numpy(path, "train")
    with pytest.raises(InputError, match="no array 'val_images'; save the validation images and labels too; did "):
        read_numpy(path, "val")
    with pytest.raises(InputError, match="nowhere: no array 'val_images'; give an .npz file, or a folder of"):
        read_numpy(tmp_path / "nowhere", "val")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_damage_in_a_compressed_array_raises_a_one_line_error(tmp_path, method):
    with zipfile.ZipFile(path := tmp_path / "data.npz", "w", method) as archive:
        [archive.writestr(f"{name}.npy", npy_bytes(array)) for name, array in ARRAYS.items()]
    path.write_bytes(path.read_bytes()[:80] + bytes(40) + path.read_bytes()[120:])
    with pytest.raises(InputError, match="data.npz.*: damaged .*; download it again"):
        read_numpy(path, "train")


def npy_bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(shape: str, dtype: str = "|u1") -> bytes:
    return raw_header(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode())


def raw_header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def write_raw(folder: Path, kind: str, content: bytes) -> Path:
    """Write a data set whose file of training images has these bytes. All other arrays are valid."""
    if kind == "folder":
        save(folder, kind, ARRAYS)
        (folder / "train_images.npy").write_bytes(content)
        return folder
    with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in ARRAYS.items():
            archive.writestr(f"{name}.npy", content if name == "train_images" else npy_bytes(array))
    return folder / "data.npz"


VALID = npy_bytes(IMAGES)


@pytest.mark.parametrize("kind", ["npz", "folder"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an array that NumPy saved; write it with np.save or np.savez"),
        (pickle.dumps(IMAGES), "not an array that NumPy saved"),
        (b"\x93NUMPY\x09\x00" + VALID[8:], "not an array that NumPy saved"),
        (raw_header(b"{[]: 1}"), "not an array that NumPy saved"),
        (raw_header(b"a\n  b\n c"), "not an array that NumPy saved"),
        pytest.param(raw_header(b"1" + 4000 * b"+1"), "not an array that NumPy saved", id="RecursionError"),
        pytest.param(raw_header(9000 * b"-" + b"1"), "not an array that NumPy saved", id="MemoryError"),
        (VALID[:-1], "cut short: the header promises 360 bytes, but 359 follow it; download it again"),
        (VALID + b"x", "the header promises 360 bytes, but more follow it"),
        (header("(1099511627776,)"), "the header promises 1099511627776 bytes, but 0 follow it"),
        (header("(5, -4, 6, 3)") + bytes(360), r"uint8 of shape \(5, -4, 6, 3\): neither"),
        (header("(0, 4611686018427387904, 4611686018427387904, 3)"), "damaged|at least one example"),
        (header("(5, 4, 6)", "(3,)u1") + bytes(360), "neither numbers nor strings"),
        (header("(5, 4, 6, 3)") + bytes(2**26), "the header promises 360 bytes, but more follow it"),
        (header(f"({2**26 + 1},)") + bytes(2**26), "the header promises 67108865 bytes, but 67108864 follow it"),
    ],
)
def test_damaged_and_forged_files_raise_a_one_line_error_and_allocate_little_memory(tmp_path, kind, content, message):
    path = write_raw(tmp_path, kind, content)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message) as error:
            read_numpy(path, "train")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith(error_prefix(path, "train_images"))


def test_a_truncated_or_encrypted_archive_raises_a_one_line_error(tmp_path):
    path = save(tmp_path, "npz", ARRAYS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(InputError, match="data.npz: damaged .File is not a zip file.; download it again"):
        read_numpy(path, "train")
    # Bit 0 of the flags marks an entry as encrypted. In the directory, the flags begin at byte 8 of an entry.
    entries = whole.split(b"PK\x01\x02")
    path.write_bytes(
        b"PK\x01\x02".join([entries[0], *(entry[:4] + bytes([entry[4] | 1]) + entry[5:] for entry in entries[1:])])
    )
    with pytest.raises(InputError, match="encrypted, password required for extraction; save it again with np.savez"):
        read_numpy(path, "train")


@given(st.data())
def test_a_flipped_byte_of_an_archive_is_an_error_or_changes_nothing(data):
    with tempfile.TemporaryDirectory() as name:
        path = save(Path(name), "compressed npz", ARRAYS)
        damaged = bytearray(path.read_bytes())
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged)
        try:
            table = read_numpy(path, "train")
        except InputError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            np.testing.assert_array_equal(table.images, IMAGES)
