"""Reads IDX files, the format of MNIST and Fashion-MNIST.

    FOLDER/train-images-idx3-ubyte  train-labels-idx1-ubyte    the training examples
    FOLDER/t10k-images-idx3-ubyte   t10k-labels-idx1-ubyte     the validation examples
    FOLDER/classes.txt                                         optional: the names of the classes, one per line

A file may be compressed and end in .gz. If both files exist, the plain file is read. Colour images [N, H, W, C] have
four dimensions and may be named idx4. A file consists of two zero bytes, the code of the elements' type, the number of
dimensions, their lengths as big-endian uint32, and the elements in row-major order
(https://yann.lecun.com/exdb/mnist, "the IDX file format").
"""

import gzip
import math
import os
import struct
from pathlib import Path

import numpy as np

from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.core.files import open_regular
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.format import LocalFormat
from jaxddp.data.formats.array_files import as_input_errors, make_table, numbered_names, read_names, read_rest
from jaxddp.data.source import Split

CLASSES_FILE = "classes.txt"

_IMAGES = {
    "train": ("train-images-idx3-ubyte", "train-images-idx4-ubyte"),
    "val": ("t10k-images-idx3-ubyte", "t10k-images-idx4-ubyte"),
}
_LABELS = {"train": ("train-labels-idx1-ubyte",), "val": ("t10k-labels-idx1-ubyte",)}
_NAMES = tuple(name for names in (*_IMAGES.values(), *_LABELS.values()) for name in names)

_UNSIGNED_BYTE = 0x08
_GZIP = b"\x1f\x8b"
_LARGE = 1 << 30
"""The size of an array in bytes from which the size in a gzip file is believed."""


def holds_idx(folder: Path) -> bool:
    """Return whether the folder holds any of these files."""
    return _find(folder, _NAMES) is not None


def read_idx(folder: Path, split: Split) -> ArrayTable:
    """Read one split: images uint8[N, H, W, C], with C = 1 for gray images.

    Raises:
        InputError: a file is missing, not IDX, cut short, too long or damaged, or its elements are not unsigned bytes;
            the numbers of labels and images differ, or a label has no name. The message names the file.
    """
    images_file, labels_file = _find_or_raise(folder, _IMAGES[split]), _find_or_raise(folder, _LABELS[split])
    labels = _read(labels_file, {1: "labels"})
    if (classes := folder / CLASSES_FILE).is_file():
        names = read_names(classes)
    else:
        files_of_labels = filter(None, (_find(folder, published) for published in _LABELS.values()))
        names = numbered_names(*(_read(file, {1: "labels"}) for file in files_of_labels))
    images = _read(images_file, {3: "gray images", 4: "colour images"})
    return make_table(images, labels, names, images_file, labels_file)


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    # In an archive of Kaggle's, each file is called train-images.idx3-ubyte, or is in a folder with its own name.
    spelled = [form for name in names for form in (name, name.replace("-idx", ".idx"), f"{name}/{name}")]
    files = (folder / f"{name}{suffix}" for suffix in ("", ".gz") for name in spelled)
    return next((file for file in files if file.is_file()), None)


def _find_or_raise(folder: Path, names: tuple[str, ...]) -> Path:
    if file := _find(folder, names):
        return file
    beside = ", ".join(sorted(file.name for name in _NAMES if (file := _find(folder, (name,)))))
    raise InputError(f"{folder / names[0]}: no such file, with or without .gz; put it next to {beside}")


def _read(file: Path, kinds: dict[int, str]) -> np.ndarray:
    """Read one file as uint8[...].

    Args:
        kinds: a dict from each allowed number of dimensions to the kind of content, for messages.
    """
    with as_input_errors(file), open_regular(file) as raw:
        # Browsers unpack some downloads but keep their names, so only the content shows whether a file is compressed.
        stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw
        magic = stream.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0":
            raise InputError(f"magic number {magic!r}: an IDX file begins with two zero bytes; download it again")
        _, code, rank = struct.unpack(">HBB", magic)
        if code != _UNSIGNED_BYTE:
            raise InputError(f"elements of type code 0x{code:02x}: convert them to unsigned bytes, 0x08")
        if rank not in kinds:
            allowed = " or ".join(f"{rank} ({kind})" for rank, kind in kinds.items())
            raise InputError(f"{rank} dimensions: expected {allowed}; check that the file is what its name says")
        shape = np.frombuffer(stream.read(4 * rank), ">u4", rank).tolist()
        header, promised, stored = 4 + 4 * rank, math.prod(shape), os.fstat(raw.fileno()).st_size
        if stream is not raw:
            # A gzip file ends with the size of its last member, modulo 2**32. Small files may have several members.
            stored = int.from_bytes(os.pread(raw.fileno(), 4, stored - 4), "little")
            if (header + promised - stored) % (1 << 32) == 0:
                stored = header + promised
            elif promised < _LARGE:
                stored = None
        return np.frombuffer(read_rest(stream, promised, stored and stored - header), np.uint8).reshape(shape)


FORMATS.add("idx")(LocalFormat("a directory with train-images-idx3-ubyte (IDX files)", holds_idx, read_idx))
