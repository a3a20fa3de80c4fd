"""Reads a packed data set: resized images in a few TFRecord files, and an index of their offsets.

    DIR/packed.json            the classes, the options of packing, and the size of every file
    DIR/train-00000.tfrecord   records of features `image` (JPEG or PPM), `label` and `id`
    DIR/train.npz              id bytes 'S'[N], label int32[N], shard int32[N] (the number of the file), offset int64[N]

Rows, ids, labels and classes equal those of the original data set, so training uses the same order.
"""

from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.data.faults import Refuse, raise_fault
from jaxddp.data.format import LocalFormat
from jaxddp.data.formats.array_files import as_input_errors, check_names
from jaxddp.data.formats.numpy_files import unpack_array
from jaxddp.data.source import Split
from jaxddp.data.storage.shards import RecordFiles
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

MANIFEST = "packed.json"
FEATURE = "image"
_PACK_AGAIN = "pack the data set again"


def holds_packed(root: Path) -> bool:
    """Return whether a directory is a packed data set."""
    return (root / MANIFEST).is_file()


def read_packed(root: Path, split: Split, refuse: Refuse = raise_fault) -> ExampleTable:
    """Read one split of a packed data set. A file that is missing, or whose size has changed, is rejected.

    Raises: InputError if the split is missing, its index is missing or damaged, or no file can be used.
    """
    manifest = _manifest(root)
    if split not in manifest["splits"]:
        raise InputError(f"{root / MANIFEST}: has no split {split!r}; {_PACK_AGAIN} with it")
    of_split, unusable_shards = manifest["splits"][split]["files"], list[int]()
    for number, (name, size) in enumerate(of_split.items()):
        file = root / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "no such file" if actual is None else f"{actual} bytes, but it was written with {size}"
            refuse(f"{file}: {state}; copy it again, or {_PACK_AGAIN}")
            unusable_shards.append(number)
    image_id, label, shard, offset = _columns(root / f"{split}.npz", len(of_split))
    path = np.array([name.encode() for name in of_split], "S")[shard]
    classes = tuple(manifest["classes"]["ids"]), tuple(manifest["classes"]["names"])
    table = ExampleTable(RecordFiles(LocalFiles(root), FEATURE), image_id, path, label, *classes, offset=offset)
    return table.without(np.flatnonzero(np.isin(shard, unusable_shards)))


def _columns(file: Path, num_files: int) -> list[np.ndarray]:
    with as_input_errors(file, _PACK_AGAIN):
        files.open_regular(file).close()
        columns = [unpack_array(file, name) for name in ("id", "label", "shard", "offset")]
        kinds, shapes = "".join(column.dtype.kind for column in columns), {column.shape for column in columns}
        if kinds != "Siii" or shapes != {(len(columns[0]),)} or not np.isin(columns[2], np.arange(num_files)).all():
            raise ValueError(f"columns of kinds {kinds} and shapes {[*shapes]}")
        return columns


def _manifest(root: Path) -> dict:
    file = root / MANIFEST
    with as_input_errors(file, _PACK_AGAIN):
        manifest = files.parse_json(files.read(file), dict)
        ids, names = (manifest["classes"][key] for key in ("ids", "names"))
        num_bytes = [size for split in manifest["splits"].values() for size in split["files"].values()]
        are_typed = {*map(type, (*ids, *names))} <= {str} and {*map(type, num_bytes)} <= {int}
        if not are_typed or len(ids) != len(names):
            raise ValueError("its classes or its files have other values than `jaxddp data pack` writes")
        check_names(ids, lambda place: f"class {place}")
        return manifest


_DESCRIPTION = "a directory with packed.json (`jaxddp data pack`)"
FORMATS.add("packed_records")(LocalFormat(_DESCRIPTION, holds_packed, read_packed, skips_faults=True))
