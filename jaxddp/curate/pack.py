"""`jaxddp data pack`: a resized copy of a data set in a few record files, once, for quicker training ever after."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import jaxddp.files as files
from jaxddp.curate.check import CheckProgress
from jaxddp.data.formats.packed import FEATURE, MANIFEST, PackedSplit, shard_name
from jaxddp.data.images.pillow import open_sound
from jaxddp.data.images.verify import verify
from jaxddp.data.opening import Table
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError

SHARD_BYTES = 1 << 30
_RECORD_OVERHEAD = 16
_ROWS_AHEAD = 256


@dataclass(frozen=True)
class Packing:
    """How images are packed.

    Attributes:
        short_side: pixels; an image's shorter side is brought down to it, an image that is smaller keeps its size.
        quality: of the JPEG files that are written, 1 to 100. A small image that is a plain JPEG is copied as it is.
    """

    short_side: int = 256
    quality: int = 90

    def __post_init__(self) -> None:
        if self.short_side < 1:
            raise InputError(f"--short-side {self.short_side}: give at least 1 pixel")
        if not 1 <= self.quality <= 100:
            raise InputError(f"--quality {self.quality}: give 1 to 100")


def pack(
    tables: Mapping[str, Table],
    out: Path,
    packing: Packing,
    progress: CheckProgress | None = None,
) -> dict[str, Any]:
    """Write a packed copy of the splits, in a directory that appears when it is whole; returns its manifest.

    Raises:
        InputError: the directory exists or cannot be written, images are in memory and not in files, or one of them
            cannot be used: names it.
    """
    of_files = {split: table for split, table in tables.items() if isinstance(table, ExampleTable)}
    if len(of_files) < len(tables):
        raise InputError("the images of this data set are few files already, read at once; train on it as it is")
    if out.exists():
        raise InputError(f"{out}: exists already; remove it, or choose another --out")
    making = files.create(out.parent) / f".{out.name}.{os.getpid()}.tmp"
    with files.readable_errors(out):
        making.mkdir()
    try:
        first = next(iter(of_files.values()))
        manifest = {
            "classes": {"ids": first.class_ids, "names": first.class_names, "indices": first.class_indices},
            "short_side": packing.short_side,
            "quality": packing.quality,
            "splits": _pack_splits(of_files, making, packing, progress),
        }
        files.replace(making / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        with files.readable_errors(out):
            making.rename(out)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return manifest


def packed_image(data: bytes, packing: Packing) -> bytes:
    """An encoded image as JPEG, its shorter side brought down to `packing.short_side` with an antialiasing filter.

    Raises:
        InputError: the image cannot be used.
    """
    header = verify(data)
    with open_sound(data) as image:
        scale = min(packing.short_side / min(image.size), 1)
        if scale == 1 and header.kind == "jpeg" and image.mode == "RGB":
            return data
        if image.mode.startswith("I"):
            # Of 16 bits the upper 8, as the stream takes them; Pillow would cut them off at 255.
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        width, height = (round(side * scale) for side in image.size)
        # A JPEG decodes at a half or a quarter for less work; twice the size wanted leaves the filter enough to do.
        image.draft(None, (2 * width, 2 * height))
        packed = io.BytesIO()
        resized = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
        resized.save(packed, "JPEG", quality=packing.quality)
        return packed.getvalue()


def _pack_splits(
    tables: Mapping[str, ExampleTable], folder: Path, packing: Packing, progress: CheckProgress | None
) -> dict[str, Any]:
    before, written = 0, {}
    for split, table in tables.items():

        def packed(done: int, before: int = before) -> None:
            if progress is not None:
                progress.advance(before + done, 0)

        written[split] = _pack_split(table, split, folder, packing, packed)
        before += len(table)
    return written


def _pack_split(
    table: ExampleTable, split: str, folder: Path, packing: Packing, packed: Callable[[int], None]
) -> dict[str, Any]:
    """Writes a split's records and index; returns what the manifest says of it."""
    # TensorFlow takes seconds to import, and a bad --quality should be answered at once.
    from jaxddp.data.tensorflow_cpu import tf

    shard, offset = np.zeros(len(table), np.int32), np.zeros(len(table), np.int64)
    try:
        with closing(_ShardWriter(tf, folder, split)) as shards:
            for row, image in enumerate(_packed_images(table, packing)):
                record = _example(tf, image, int(table.label[row]), bytes(table.id[row]))
                shard[row], offset[row] = shards.write(record.SerializeToString())
                packed(row + 1)
        PackedSplit(table.id, table.label, shard, offset).save(folder / f"{split}.npz")
        sizes = {name: (folder / name).stat().st_size for name in shards.names}
    except (tf.errors.OpError, OSError) as error:
        reason = getattr(error, "message", None) or getattr(error, "strerror", None) or error
        raise InputError(f"{folder.parent}: cannot be written ({reason}); free some space there") from None
    return {"examples": len(table), "fingerprint": table.fingerprint, "files": sizes}


class _ShardWriter:
    """The record files of a split, each begun when the one before it is full."""

    def __init__(self, tf: Any, folder: Path, split: str):
        self._tf, self._folder, self._split = tf, folder, split
        self._writer: Any = None
        self._position = SHARD_BYTES
        self.names: list[str] = []

    def write(self, record: bytes) -> tuple[int, int]:
        """Returns which file the record is in, and at which byte it begins."""
        if self._position >= SHARD_BYTES:
            self.close()
            self.names.append(shard_name(self._split, len(self.names)))
            self._writer = self._tf.io.TFRecordWriter(str(self._folder / self.names[-1]))
            self._position = 0
        self._writer.write(record)
        position = self._position
        self._position += len(record) + _RECORD_OVERHEAD
        return len(self.names) - 1, position

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _packed_images(table: ExampleTable, packing: Packing) -> Iterator[bytes]:
    def packed(row: int) -> bytes:
        data = table.read(row)
        try:
            return packed_image(data, packing)
        except InputError as error:
            raise InputError(f"{table.name(row)}: {error}") from None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(table), _ROWS_AHEAD):
            yield from pool.map(packed, range(start, min(start + _ROWS_AHEAD, len(table))))


def _example(tf: Any, image: bytes, label: int, image_id: bytes) -> Any:
    features = {
        FEATURE: tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "id": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image_id])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))
