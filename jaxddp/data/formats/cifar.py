"""Reads CIFAR-10 and CIFAR-100 in their binary versions (https://www.cs.toronto.edu/~kriz/cifar.html).

    cifar-10-batches-bin/    data_batch_1.bin ... data_batch_5.bin  test_batch.bin  batches.meta.txt
    cifar-100-binary/        train.bin  test.bin  fine_label_names.txt

A file is a sequence of records: one byte for the label (CIFAR-100: the coarse label, then the fine one), and 3,072
bytes of pixels: 32 rows of 32 red values, then the green, then the blue.
"""

from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.data.arrays import ArrayTable, check_labels
from jaxddp.data.format import LocalFormat
from jaxddp.data.formats.array_files import as_input_errors, read_names
from jaxddp.data.source import Split

_CIFAR10 = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "val": ("test_batch.bin",)}
_CIFAR100 = {"train": ("train.bin",), "val": ("test.bin",)}
_VERSIONS = {
    "cifar-10-batches-bin": ("batches.meta.txt", 1, _CIFAR10),
    "cifar-100-binary": ("fine_label_names.txt", 2, _CIFAR100),
}
"""By the folder of a published archive: the file of class names, the bytes of a label, and the files of each split."""


def holds_cifar(folder: Path) -> bool:
    """Return whether the folder is an unpacked CIFAR archive, or contains one."""
    return bool(_find_archives(folder))


def read_cifar(folder: Path, split: Split) -> ArrayTable:
    """Read one split: images uint8[N, 32, 32, 3] with the classes of CIFAR-10, or the fine classes of CIFAR-100.

    Raises:
        InputError: the folder holds both archives, a file is missing, empty or ends within a record, or a label has no
            name.
    """
    (place, version), *others = _find_archives(folder)
    if others:
        raise InputError(f"{folder}: two data sets, {place} and {others[0][0]}; give one of these folders")
    names_file, label_bytes, files_of_splits = _VERSIONS[version]
    names = read_names(place / names_file)
    parts = [_read(place / name, label_bytes, len(names)) for name in files_of_splits[split]]
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return ArrayTable(images, labels, names)


def _find_archives(folder: Path) -> list[tuple[Path, str]]:
    places = [(place, version) for version in _VERSIONS for place in (folder, folder / version)]
    return [(at, of) for at, of in places if at.is_dir() and (at.name == of or (at / _VERSIONS[of][0]).is_file())]


def _read(file: Path, label_bytes: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one file; return images, uint8[N, 32, 32, 3], and labels, uint8[N]."""
    record = label_bytes + 3 * 32 * 32
    with as_input_errors(file):
        data = np.frombuffer(files.read(file), np.uint8)
        if not data.size or data.size % record:
            raise InputError(f"{data.size} bytes: expected whole records of {record} bytes; download it again")
        records = data.reshape(-1, record)
        # A view would keep the whole file in memory.
        labels = records[:, label_bytes - 1].copy()
        check_labels(labels, len(records), num_classes)
        return np.ascontiguousarray(records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


FORMATS.add("cifar")(LocalFormat("cifar-10-batches-bin or cifar-100-binary (CIFAR)", holds_cifar, read_cifar))
