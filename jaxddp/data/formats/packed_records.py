"""Reads a packed data set: resized images in a few TFRecord files, and an index of their offsets.

    DIR/packed.json            the classes, the options of packing, and the size of every file
    DIR/train-00000.tfrecord   records of features `image` (JPEG), `label` and `id`
    DIR/train.npz              id bytes 'S'[N], label int32[N], shard int32[N] (the number of the file), offset int64[N]

Rows, ids, labels and classes equal those of the original data set, so training uses the same order.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import nearest
from jaxddp.data.faults import Refuse, check_distinct, raise_fault
from jaxddp.data.format import LocalFormat
from jaxddp.data.formats.array_files import as_input_errors
from jaxddp.data.source import Split
from jaxddp.data.storage.records import RecordFiles
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS

MANIFEST = "packed.json"
FEATURE = "image"
_PACK_AGAIN = "pack the data set again"


def holds_packed(root: Path) -> bool:
    """Return whether a directory is a packed data set."""
    return (root / MANIFEST).is_file()


def read_packed(root: Path, split: Split, refuse: Refuse = raise_fault) -> ExampleTable:
    """Read one split of a packed data set. A file that is missing, or whose size has changed, is rejected.

    Raises:
        InputError: the split is missing, its index is missing or damaged, or no file can be used.
    """
    manifest = _manifest(root)
    splits = manifest["splits"]
    if split not in splits:
        raise InputError(f"{root / MANIFEST}: has no split {split!r}{nearest(split, splits)}; {_PACK_AGAIN} with it")
    unusable_shards = []
    for number, (name, size) in enumerate(splits[split]["files"].items()):
        file = root / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "no such file" if actual is None else f"{actual} bytes, but it was written with {size}"
            refuse(f"{file}: {state}; copy it again, or {_PACK_AGAIN}")
            unusable_shards.append(number)
    names, classes = np.array([name.encode() for name in splits[split]["files"]]), manifest["classes"]
    image_id, label, shard, offset = _columns(root / f"{split}.npz")
    check_distinct(classes["ids"], lambda name: str(root / MANIFEST), refuse)
    table = ExampleTable(
        RecordFiles(root, FEATURE),
        image_id,
        names[shard],
        label,
        tuple(classes["ids"]),
        tuple(classes["names"]),
        tuple(classes["indices"]),
        offset,
        made_of="record",
    )
    return table.without(np.flatnonzero(np.isin(shard, unusable_shards)).tolist())


def _columns(file: Path) -> list[np.ndarray]:
    with (
        as_input_errors(file, _PACK_AGAIN, missing=_PACK_AGAIN),
        files.open_regular(file) as stream,
        np.load(stream, allow_pickle=False) as columns,
    ):
        return [columns[name] for name in ("id", "label", "shard", "offset")]


def _manifest(root: Path) -> dict[str, Any]:
    file = root / MANIFEST
    with as_input_errors(file, _PACK_AGAIN, missing=_PACK_AGAIN):
        return json.loads(files.read(file))


FORMATS.add("packed")(
    LocalFormat("a directory with packed.json (`jaxddp data pack`)", holds_packed, read_packed, skips_faults=True)
)
