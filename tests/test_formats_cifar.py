"""CIFAR's binary files: both archives are read, and a damaged file raises a one-line error."""

from pathlib import Path

import numpy as np
import pytest

from jaxddp.core.errors import InputError
from jaxddp.data.formats.cifar import holds_cifar, read_cifar

CIFAR_10, CIFAR_100 = "cifar-10-batches-bin", "cifar-100-binary"
NAMES, FINE_NAMES, SIZES = tuple("abcdefghij"), ("apple", "aquarium_fish", "baby"), (2, 1, 3, 1, 1)


def records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    """Return the bytes of a CIFAR file. A record has its labels, then the red, green and blue planes of its image."""
    return b"".join(
        bytes(int(column[row]) for column in labels) + b"".join(image[:, :, c].tobytes() for c in range(3))
        for row, image in enumerate(images)
    )


def random_images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)


def write_cifar_10(parent: Path) -> Path:
    """Write CIFAR-10; batch i has images of seed i with labels i, i + 1, …"""
    folder = parent / CIFAR_10
    folder.mkdir()
    for i, size in enumerate(SIZES, 1):
        (folder / f"data_batch_{i}.bin").write_bytes(records(random_images(size, i), np.arange(i, i + size)))
    (folder / "test_batch.bin").write_bytes(records(random_images(2, 9), np.arange(2)))
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return folder


def write_cifar_100(parent: Path) -> Path:
    folder = parent / CIFAR_100
    folder.mkdir()
    (folder / "train.bin").write_bytes(records(random_images(3, 1), np.array([19, 18, 0]), np.array([2, 0, 1])))
    (folder / "test.bin").write_bytes(records(random_images(1, 2), np.array([7]), np.array([1])))
    (folder / "fine_label_names.txt").write_text("\n".join(FINE_NAMES) + "\n")
    (folder / "coarse_label_names.txt").write_text("aquatic_mammals\n")
    return folder


TRAIN_10 = np.concatenate([random_images(size, i) for i, size in enumerate(SIZES, 1)])


# CIFAR-100 has fine labels.
@pytest.mark.parametrize(
    ("write", "train", "val", "names"),
    [
        (write_cifar_10, (TRAIN_10, [1, 2, 2, 3, 4, 5, 4, 5]), (random_images(2, 9), [0, 1]), NAMES),
        (write_cifar_100, (random_images(3, 1), [2, 0, 1]), (random_images(1, 2), [1]), FINE_NAMES),
    ],
)
def test_an_archive_is_found_in_its_folder_or_in_the_parent_folder(tmp_path, write, train, val, names):
    assert not holds_cifar(tmp_path)
    for path in (write(tmp_path), tmp_path):
        assert holds_cifar(path)
        for split, (images, labels) in (("train", train), ("val", val)):
            table = read_cifar(path, split)
            np.testing.assert_array_equal(table.images, images)
            assert (table.labels.tolist(), table.class_names) == (labels, names)
            assert table.images.flags.c_contiguous


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_4.bin", None, "no such file; download it again"),
        ("data_batch_2.bin", bytes(3073 + 3072), "6145 bytes: expected whole records of 3073 bytes"),
        ("data_batch_2.bin", bytes(3073) + b"\x0a" + bytes(3072), "label 10 of row 1: 10 class names allow 0..9"),
        ("batches.meta.txt", b"\n", "empty; write one class name per line"),
    ],
)
def test_a_faulty_file_raises_a_one_line_error(tmp_path, file, content, message):
    folder = write_cifar_10(tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_cifar(tmp_path, "train")
    assert str(error.value).startswith(f"{folder / file}: ")
    if file.startswith("data_batch"):
        assert len(read_cifar(tmp_path, "val")) == 2


def test_two_archives_are_an_error(tmp_path):
    write_cifar_10(tmp_path), write_cifar_100(tmp_path)
    assert holds_cifar(tmp_path)
    with pytest.raises(InputError, match=f"two data sets, .*{CIFAR_10} and .*{CIFAR_100}; give one of these folders"):
        read_cifar(tmp_path, "train")
