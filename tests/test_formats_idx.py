"""IDX files: pixels are read as they were written, and a damaged file raises a one-line error."""

import gzip
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jaxddp.core.errors import InputError
from jaxddp.data.formats.idx import holds_idx, read_idx

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
VAL_IMAGES, VAL_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def idx(array: np.ndarray, *, code: int = 8) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.arange(count * np.prod(shape)).reshape(count, *shape) % 251


def write(folder: Path, **changed: bytes | None) -> Path:
    """Write five training and three validation examples of 4x6 pixels, with labels below 4.

    `changed` are other contents for some files. The content None omits a file.
    """
    files = {
        "train_images": (TRAIN_IMAGES, idx(pixels(5, 4, 6))),
        "train_labels": (TRAIN_LABELS, idx(np.array([0, 1, 2, 1, 0]))),
        "val_images": (VAL_IMAGES, idx(pixels(3, 4, 6))),
        "val_labels": (VAL_LABELS, idx(np.array([3, 0, 1]))),
        "classes": ("classes.txt", None),
    }
    for key, (name, default) in files.items():
        content = changed.get(key, default)
        if content is not None:
            (folder / name).write_bytes(content)
    return folder


@given(
    images=npst.arrays(np.uint8, npst.array_shapes(min_dims=3, max_dims=4, max_side=5)),
    is_compressed=st.booleans(),
    data=st.data(),
)
def test_the_written_data_are_read_back(images, is_compressed, data):
    assume(images.shape[1] not in (1, 3, 4) or images.shape[2:] != (5, 5))  # Such channels are first, an error.
    labels = data.draw(npst.arrays(np.uint8, len(images)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert not holds_idx(folder)
        for file, content in ((VAL_IMAGES, idx(images)), (VAL_LABELS, idx(labels))):
            stored = gzip.compress(content) if is_compressed else content
            (folder / f"{file}{'.gz' * is_compressed}").write_bytes(stored)
        assert holds_idx(folder)
        table = read_idx(folder, "val")
    np.testing.assert_array_equal(table.images, images if images.ndim == 4 else images[..., None])
    np.testing.assert_array_equal(table.labels, labels)
    assert table.class_names == tuple(map(str, range(int(labels.max()) + 1)))


def test_the_splits_have_separate_files_and_the_same_classes(tmp_path):
    train, val = (read_idx(write(tmp_path), split) for split in ("train", "val"))
    np.testing.assert_array_equal(train.images[..., 0], pixels(5, 4, 6))
    np.testing.assert_array_equal(val.images[..., 0], pixels(3, 4, 6))
    assert train.labels.tolist() == [0, 1, 2, 1, 0] and val.labels.tolist() == [3, 0, 1]
    assert train.class_names == val.class_names == ("0", "1", "2", "3")


def test_class_names_come_from_classes_txt_and_images_from_files_of_other_names(tmp_path):
    write(tmp_path, classes="\ufefft-shirt\r\nankle boot\nété\nd\n\n".encode())
    # The uncompressed file takes precedence over the compressed one.
    (tmp_path / f"{TRAIN_IMAGES}.gz").write_bytes(b"never opened")
    table = read_idx(tmp_path, "train")
    assert table.class_names == ("t-shirt", "ankle boot", "été", "d") and len(table) == 5
    for unused in (TRAIN_IMAGES, f"{TRAIN_IMAGES}.gz"):
        (tmp_path / unused).unlink()
    (tmp_path / "train-images-idx4-ubyte").write_bytes(idx(pixels(5, 4, 6, 3)))
    np.testing.assert_array_equal(read_idx(tmp_path, "train").images, pixels(5, 4, 6, 3))


IMAGES = idx(pixels(5, 4, 6))
COMPRESSED = gzip.compress(IMAGES, mtime=0)


@pytest.mark.parametrize(
    ("changed", "file", "message"),
    [
        ({"train_images": None}, TRAIN_IMAGES, "no such file, with or without .gz; put it next to t10k-images-idx3-u"),
        ({"train_images": b"<html>"}, TRAIN_IMAGES, "magic number b'<htm': an IDX file begins with two zero bytes"),
        ({"train_images": idx(pixels(5, 4, 6), code=13)}, TRAIN_IMAGES, "elements of type code 0x0d: convert them"),
        ({"train_images": idx(np.zeros(5))}, TRAIN_IMAGES, r"1 dimensions: expected 3 \(gray images\) or 4 \(colour"),
        ({"train_images": IMAGES[:9]}, TRAIN_IMAGES, "damaged .buffer is smaller than requested size.; download it"),
        ({"train_images": IMAGES[:-1]}, TRAIN_IMAGES, "the header promises 120 bytes, but 119 follow it; download"),
        ({"train_images": IMAGES + b"x"}, TRAIN_IMAGES, "the header promises 120 bytes, but more follow it; download"),
        ({"train_images": COMPRESSED[:-9]}, TRAIN_IMAGES, "damaged .Compressed file ended before .*; download it"),
        ({"train_images": COMPRESSED[:-8] + b"\0" * 8}, TRAIN_IMAGES, "damaged .CRC check failed .*; download it"),
        ({"train_images": COMPRESSED[:10] + b"\xff" * 99}, TRAIN_IMAGES, "damaged .Error -3 while decompressing"),
        ({"train_labels": idx(np.zeros(4))}, TRAIN_LABELS, r"labels of shape \(4,\) for 5 images: give one label per"),
        ({"train_images": idx(pixels(0, 4, 6))}, TRAIN_IMAGES, "a data set needs at least one example"),
        ({"val_labels": b"\0\0\x08"}, VAL_LABELS, "magic number"),
        ({"classes": b"a\nb\n"}, TRAIN_LABELS, "label 2 of row 2: 2 class names allow 0..1"),
        ({"classes": b"a\n\nb\nc\n"}, "classes.txt", "line 2 is blank; write one class name per line, in label order"),
        ({"classes": b"a\n\xff\n"}, "classes.txt", "not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_faulty_file_raises_a_one_line_error(tmp_path, changed, file, message):
    with pytest.raises(InputError, match=message) as error:
        read_idx(write(tmp_path, **changed), "train")
    assert str(error.value).startswith(f"{tmp_path / file}: ")


FORGED = struct.pack(">HBBIII", 0, 8, 3, 2**20, 2**10, 2**10)
SHORT = struct.pack(">HBBIII", 0, 8, 3, 2**10, 2**10, 2**10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: FORGED + b"abc", "the header promises 1099511627776 bytes, but 3 follow it"),
        (lambda: gzip.compress(FORGED + b"abc"), "the header promises 1099511627776 bytes, but 3 follow it"),
        (lambda: struct.pack(">HBBIII", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), "damaged|at least one example"),
        (lambda: gzip.compress(IMAGES + bytes(2**27)), "the header promises 120 bytes, but more follow it"),
        (lambda: gzip.compress(SHORT + bytes(2**26)), "the header promises 1073741824 bytes, but 67108864 follow it"),
    ],
    ids=["uncompressed", "compressed", "no images", "decompression bomb", "decompression bomb that is too short"],
)
def test_forged_headers_and_decompression_bombs_allocate_little_memory(tmp_path, content, message):
    write(tmp_path, train_images=content())
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message):
            read_idx(tmp_path, "train")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@given(st.integers(0, len(COMPRESSED) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_an_error_or_changes_nothing(position, change):
    damaged = bytearray(COMPRESSED)
    damaged[position] ^= change
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), train_images=bytes(damaged))
        try:
            table = read_idx(folder, "train")
        except InputError as error:
            assert str(error).startswith(f"{folder / TRAIN_IMAGES}: ")
        else:
            np.testing.assert_array_equal(table.images[..., 0], pixels(5, 4, 6))
