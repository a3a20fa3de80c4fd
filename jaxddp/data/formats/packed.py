"""A packed data set: resized images in a few TFRecord files, each found by its offset, and an index of the offsets.

    DIR/packed.json            classes, how the images were made, and the size of every file
    DIR/train-00000.tfrecord   records of features `image` (JPEG), `label` and `id`
    DIR/train.npz              by row: id, label, shard and offset

Rows, ids, labels and classes are those of the data set that was packed, so the order of training is the same.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.data.format import LocalFormat
from jaxddp.data.source import Split
from jaxddp.data.storage.records import RecordFiles
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError
from jaxddp.registry import FORMATS
from jaxddp.wording import nearest

MANIFEST = "packed.json"
FEATURE = "image"
_AGAIN = "pack the data set again"


@dataclass(frozen=True)
class PackedSplit:
    """What `DIR/<split>.npz` holds: id bytes 'S'[N], label int32[N], shard int32[N] (which file), offset int64[N]."""

    id: np.ndarray
    label: np.ndarray
    shard: np.ndarray
    offset: np.ndarray

    def save(self, file: Path) -> None:
        np.savez(file, id=self.id, label=self.label, shard=self.shard, offset=self.offset)

    @classmethod
    def load(cls, file: Path) -> "PackedSplit":
        """Raises: InputError where the file is missing or damaged."""
        try:
            with np.load(file, allow_pickle=False) as columns:
                return cls(**{name: columns[name] for name in ("id", "label", "shard", "offset")})
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; {_AGAIN}") from None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"{file}: damaged ({error}); {_AGAIN}") from None


def holds_packed(root: Path) -> bool:
    """Whether a directory is a packed data set."""
    return (root / MANIFEST).is_file()


def read_packed(root: Path, split: Split) -> ExampleTable:
    """One split of a packed data set.

    Raises:
        InputError: there is no such split, or a file is missing, damaged, or not of the size that it was written with.
    """
    manifest = read_manifest(root)
    splits = manifest["splits"]
    if split not in splits:
        raise InputError(f"{root / MANIFEST}: has no split {split!r}{nearest(split, splits)}; {_AGAIN} with it")
    for name, size in splits[split]["files"].items():
        file = root / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "no such file" if found is None else f"{found} bytes, and it was written with {size}"
            raise InputError(f"{file}: {state}; copy it again, or {_AGAIN}")
    columns = PackedSplit.load(root / f"{split}.npz")
    names = np.array([name.encode() for name in splits[split]["files"]])
    classes = manifest["classes"]
    return ExampleTable(
        RecordFiles(root, FEATURE),
        columns.id,
        names[columns.shard],
        columns.label,
        tuple(classes["ids"]),
        tuple(classes["names"]),
        tuple(classes["indices"]),
        columns.offset,
    )


def read_manifest(root: Path) -> dict[str, Any]:
    """What `packed.json` says. Raises: InputError where it cannot be read."""
    file = root / MANIFEST
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}); {_AGAIN}") from None


FORMATS.add("packed")(LocalFormat("a directory with packed.json (`jaxddp data pack`)", holds_packed, read_packed))
