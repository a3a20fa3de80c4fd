"""Reads arrays that NumPy saved: one .npz file, or a folder of .npy files.

    train_images  val_images     uint8 or uint16 [N, H, W, C], or floats from 0 to 1
    train_labels  val_labels     integers [N], class indices from 0
    class_names                  optional: strings [K]

Names like x_train, y_train, x_test, y_test, X_valid and test_images are read, too.

Images in a folder are memory-mapped: a batch reads only its own rows, so the images may be larger than the memory.
Arrays of floats are read into memory at once. Pickled objects are never read, since reading them can run any code.
"""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import IO, cast

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, choices
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.format import LocalFormat
from jaxddp.data.formats import array_files
from jaxddp.data.source import Split

_NAMES = "class_names"
_WORDS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "test")}
_KINDS = {"images": ("images", "x"), "labels": ("labels", "y")}
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def holds_numpy(path: Path) -> bool:
    """Return whether the path is an .npz file, or a folder with an array of either split."""
    if path.is_file():
        return path.suffix == ".npz"
    existing = array_names(path) if path.is_dir() else []
    return any(_find_name(existing, split, kind) in existing for split in _WORDS for kind in _KINDS)


def read_numpy(path: Path, split: Split) -> ArrayTable:
    """Read the arrays of one split.

    Raises:
        InputError: an array is missing (the message names the existing ones), a file is cut short, was not saved by
            NumPy or holds pickled objects, or `ArrayTable` rejects the arrays.
    """
    existing = array_names(path)
    of_split = {kind: _find_name(existing, split, kind) for kind in _KINDS}
    images, labels = (_read_array(path, name, existing) for name in of_split.values())
    if _NAMES in existing:
        names, where = _read_array(path, _NAMES, existing), _array_place(path, _NAMES)
        if names.ndim != 1 or names.dtype.kind != "U":
            raise InputError(f"{where}: {names.dtype} of shape {names.shape}: give strings, one per class")
        names = tuple(map(str, names))
        array_files.check_names(names, lambda place: f"{where}[{place}]")
    else:
        every = [_find_name(existing, one, "labels") for one in _WORDS]
        of_splits = [_read_array(path, name, existing) for name in every if name in existing]
        with array_files.as_input_errors(path):
            names = array_files.numbered_names(*of_splits)
    return array_files.make_table(images, labels, names, *(_array_place(path, name) for name in of_split.values()))


def _find_name(existing: Sequence[str], split: Split, kind: str) -> str:
    """Return the name of an array; the first of its usual names if there is none.

    Images and labels of a split have the same word: the first that has both, or else one of them.
    """
    folded = {name.lower(): name for name in existing}

    def found(word: str, kind: str) -> list[str]:
        usual = [name for one in _KINDS[kind] for name in (f"{word}_{one}", f"{one}_{word}")]
        return [folded[name] for name in usual if name in folded]

    word = max(_WORDS[split], key=lambda word: sum(bool(found(word, each)) for each in _KINDS))
    return next(iter(found(word, kind)), f"{word}_{kind}")


def array_names(path: Path) -> list[str]:
    """Return the names of all arrays in the file or folder."""
    if not path.is_file():
        return sorted(file.stem for file in path.glob("*.npy"))
    with array_files.as_input_errors(path), zipfile.ZipFile(path) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))


def _array_place(path: Path, name: str) -> str:
    return f"{path}: {name}" if path.is_file() else f"{path / name}.npy"


def _read_array(path: Path, name: str, names_in_file: list[str]) -> np.ndarray:
    if name not in names_in_file:
        advice = "give an .npz file, or a folder of .npy files"
        if names_in_file:
            # A validation set cannot be held out of arrays.
            also = "save the validation images and labels too; " if name.startswith("val_") else ""
            advice = also + choices(name, names_in_file)
        raise InputError(f"{path}: no array {name!r}; {advice}")
    with array_files.as_input_errors(_array_place(path, name)):
        if path.is_file():
            return unpack_array(path, name)
        file = path / f"{name}.npy"
        with files.open_regular(file) as stream:
            shape, _, dtype = _read_header(stream)
            array_files.check_length(file.stat().st_size - stream.tell(), math.prod(shape) * dtype.itemsize)
        return np.load(file, mmap_mode="r", allow_pickle=False)


def unpack_array(path: Path, name: str) -> np.ndarray:
    """Read an array of an .npz file. Raises: InputError, or an error of zipfile, if the file is damaged."""
    # np.load would allocate the memory that the array's header promises before it reads the first byte.
    with zipfile.ZipFile(path) as archive:
        try:
            stream = cast(zipfile.ZipExtFile, archive.open(f"{name}.npy"))
        except RuntimeError as error:
            # The array is encrypted, or compressed with a method that this Python lacks.
            raise InputError(f"{error}; save it again with np.savez") from None
        with stream:
            shape, column_major, dtype = _read_header(stream)
            stored = archive.getinfo(f"{name}.npy").file_size - stream.tell()
            data = array_files.read_rest(stream, math.prod(shape) * dtype.itemsize, stored)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if column_major else "C")


def _read_header(stream: IO[bytes] | zipfile.ZipExtFile) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an array; return (shape, whether it is column-major, dtype)."""
    try:
        shape, column_major, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
    # The header is a Python expression, so damage can raise many errors.
    except (KeyError, MemoryError, RecursionError, SyntaxError, TokenError, TypeError, ValueError):
        raise InputError("not an array that NumPy saved; write it with np.save or np.savez") from None
    if dtype.hasobject:
        raise InputError("holds pickled Python objects, which are never read; save numbers, or strings of dtype=str")
    if min(shape, default=0) < 0 or dtype.shape or not dtype.itemsize:
        raise InputError(f"{dtype} of shape {shape}: neither numbers nor strings; save it again with np.save")
    return shape, column_major, dtype


FORMATS.add("numpy_files")(LocalFormat("an .npz file or a directory with train_images.npy", holds_numpy, read_numpy))
