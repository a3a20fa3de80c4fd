"""`jaxddp data pack`: writes a resized copy of a data set into a few record files, which train faster."""

import io
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image

import jaxddp.core.files as files
from jaxddp.config.data_section import Pixels
from jaxddp.core.errors import InputError, Key, about, first_line, show
from jaxddp.core.ranges import Range
from jaxddp.core.threads import map_in_threads
from jaxddp.data.formats.packed_records import FEATURE, MANIFEST
from jaxddp.data.images import open_sound, sound_image
from jaxddp.data.source import Table, labels_of

SHARD_BYTES = 1 << 30
_RECORD_OVERHEAD = 16


@dataclass(frozen=True)
class PackOptions:
    """The options of packing images."""

    short_side: Pixels = 256
    """The pixels to which the shorter side of an image is reduced; a smaller image keeps its size."""
    quality: Annotated[int, Range(1, 100)] = 90
    """The quality of the JPEG images, 1 to 100. A small RGB JPEG is copied unchanged."""


def pack(
    sources: Mapping[str, Table],
    out: Path,
    packing: PackOptions,
    progress: Callable[[int, int], None] = lambda done, faults: None,
) -> dict[str, Any]:
    """Write a packed copy of the splits into a directory, and return its manifest.

    The directory appears only when it is complete. `progress` is that of `jaxddp.core.phases.counting_images`.

    Raises:
        InputError: the directory exists or cannot be written, the images are in memory, the splits have different
            classes, or an image cannot be used (the message names it).
    """
    if any(source.pixel_shape is not None for source in sources.values()):
        raise InputError("the images of this data set are already arrays in few files; train on it directly")
    for source in sources.values():
        labels = labels_of(source)
        if labels.several and len(several := np.flatnonzero(labels.values.sum(1) > 1)):
            names = ", ".join(labels.names[label] for label in labels.of(int(several[0])))
            fault = f"several labels ({names}), but packing accepts one label per row"
            of_all = f"{len(several)} of {len(source)} rows have several"
            advice = "keep one label per row, or set ", Key("data.classes"), " to classes of which no row has two"
            raise InputError(f"{source.name(int(several[0]))}: {fault} ({of_all})", advice=advice)
    _check_classes(sources)
    if out.exists():
        raise InputError(f"{out}: exists already; remove it, or choose another --out")
    done = count(1)
    with files.whole_folder(out) as unfinished:
        first = next(iter(sources.values()))
        manifest = {
            "classes": {"ids": first.class_ids, "names": first.class_names},
            "short_side": packing.short_side,
            "quality": packing.quality,
            "splits": {
                split: _pack_split(source, split, unfinished, packing, lambda: progress(next(done), 0))
                for split, source in sources.items()
            },
        }
        files.replace(unfinished / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


def _check_classes(sources: Mapping[str, Table]) -> None:
    """Check that all splits have the classes of the first one, in the same order. Raises: InputError."""
    (first, whole), *others = sources.items()
    for split, source in others:
        for place, (one, other) in enumerate(zip_longest(source.class_ids, whole.class_ids)):
            if one != other:
                fault = f"class {place} is {show(one)}, and {show(other)} in {first}"
                raise InputError(f"{split}: {fault}; give all splits the same classes in the same order")


def packed_image(data: bytes, packing: PackOptions) -> bytes:
    """Return an image as JPEG, with its shorter side reduced to `packing.short_side` by an antialiasing filter.

    Raises: InputError if the image cannot be used.
    """
    header, _ = sound_image(data)
    with open_sound(data) as image:
        scale = min(packing.short_side / min(image.size), 1)
        if scale == 1 and header.kind == "jpeg" and image.mode == "RGB":
            return data
        try:
            return _resized(image, scale, packing.quality)
        # Pillow also raises these errors if it cannot decode the image, or cannot encode it as JPEG.
        except (OSError, ValueError, SyntaxError) as error:
            reason = first_line(error)
    raise InputError(f"cannot be converted to JPEG ({reason}); convert or shrink it, or leave it out")


def _resized(image: Image.Image, scale: float, quality: int) -> bytes:
    """Return a scaled image as JPEG. Raises: an error of Pillow."""
    if image.mode.startswith("I"):
        # Keep the upper 8 of 16 bits, as training does. Pillow would clip the values at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    width, height = (round(side * scale) for side in image.size)
    # Decoding at a half or a quarter of the size is faster. The filter needs no more than twice the final size.
    image.draft(None, (2 * width, 2 * height))
    jpeg = io.BytesIO()
    resized = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    resized.save(jpeg, "JPEG", quality=quality)
    return jpeg.getvalue()


def _pack_split(
    source: Table, split: str, folder: Path, packing: PackOptions, progress: Callable[[], None]
) -> dict[str, Any]:
    """Write the records and the index of a split; return its entry in the manifest."""
    # Import TensorFlow late: it takes seconds, and a wrong --quality must be rejected at once.
    from jaxddp.data.stream.tensorflow_cpu import tf

    def packed_row(row: int) -> bytes:
        data = source.read(row)
        with about(source.name(row)):
            return packed_image(data, packing)

    def serialized(image: bytes, row: int) -> bytes:
        binary = {FEATURE: image, "id": ids[row]}
        features = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[it])) for name, it in binary.items()}
        label = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(source.labels[row])]))
        example = tf.train.Example(features=tf.train.Features(feature={**features, "label": label}))
        return example.SerializeToString(deterministic=True)

    ids = [os.fsencode(str(source.record(row).id)) for row in range(len(source))]
    shard, offset, shards = np.zeros(len(source), np.int32), np.zeros(len(source), np.int64), list[str]()
    writer, shard_size = None, SHARD_BYTES
    try:
        with ExitStack() as open_writers:
            for row, image in enumerate(map_in_threads(packed_row, range(len(source)), os.cpu_count() or 1)):
                if writer is None or shard_size >= SHARD_BYTES:
                    open_writers.close()
                    shards.append(f"{split}-{len(shards):05d}.tfrecord")
                    writer, shard_size = open_writers.enter_context(tf.io.TFRecordWriter(str(folder / shards[-1]))), 0
                record = serialized(image, row)
                writer.write(record)
                shard[row], offset[row] = len(shards) - 1, shard_size
                shard_size += len(record) + _RECORD_OVERHEAD
                progress()
        np.savez(folder / f"{split}.npz", id=np.array(ids), label=source.labels, shard=shard, offset=offset)
        bytes_of_files = {name: (folder / name).stat().st_size for name in shards}
    except (tf.errors.OpError, OSError) as error:
        reason = getattr(error, "message", None) or getattr(error, "strerror", None) or error
        raise InputError(f"{folder.parent}: cannot be written ({reason}); free some space there") from None
    return {"examples": len(source), "fingerprint": source.fingerprint, "files": bytes_of_files}
