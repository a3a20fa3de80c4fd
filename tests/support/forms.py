"""A small data set in each format, written from the same pictures, so every pixel that is read back is known."""

import functools
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import PackOptions, pack
from jaxddp.data.opening import open_splits
from jaxddp.data.table import ExampleTable
from support.ilsvrc import IMAGES, synset, write_csv, write_tree

SIZE = 12
CLASSES = ("ant", "bee", "cat")
COUNTS = {"train": 10, "val": 5}
LOSSLESS = {"tiff": {"compression": "tiff_lzw"}, "webp": {"lossless": True, "exact": True}}


@dataclass(frozen=True)
class Pictures:
    """A split: different images, uint8 or uint16 [N, S, S, C], and labels int[N] in `CLASSES`, grouped by class."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, row: int, kind: str = "png") -> bytes:
        image, file = self.images[row], io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(
            file, kind.upper(), **LOSSLESS.get(kind, {})
        )
        return file.getvalue()


Splits = dict[str, Pictures]


def pictures(channels: int = 3, bits: int = 8, size: int = SIZE, counts: dict[str, int] = COUNTS) -> Splits:
    """Return pictures of noise."""
    made, dtype = {}, np.uint16 if bits == 16 else np.uint8
    for split, count in counts.items():
        rng = np.random.default_rng((count, channels))
        images = rng.integers(0, np.iinfo(dtype).max, (count, size, size, channels), dtype, endpoint=True)
        made[split] = Pictures(images, np.sort(np.arange(count) % len(CLASSES)))
    return made


def put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def write_idx(folder: Path, splits: Splits | None = None) -> Path:
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    for name, split in zip(("train", "t10k"), (splits or pictures(channels=1)).values(), strict=True):
        images = split.images[..., 0] if split.images.shape[-1] == 1 else split.images
        head = struct.pack(f">HBB{images.ndim}I", 0, 8, images.ndim, *images.shape)
        (folder / f"{name}-images-idx{images.ndim}-ubyte").write_bytes(head + images.tobytes())
        labels = struct.pack(">II", 0x801, len(split)) + split.labels.astype(np.uint8).tobytes()
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return folder


def write_npz(file: Path, splits: Splits | None = None) -> Path:
    file = file.with_suffix(".npz")
    arrays: dict[str, Any] = {"class_names": np.array(CLASSES)}
    for name, split in (splits or pictures(channels=1)).items():
        arrays |= {f"{name}_images": split.images, f"{name}_labels": split.labels}
    np.savez(file, **arrays)
    return file


def write_cifar(folder: Path, splits: Splits | None = None) -> Path:
    """Write CIFAR-10 of 32 x 32 pixels; the training images are in five files."""
    splits = splits or pictures(size=32)
    folder.mkdir()
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n")
    for name, split in splits.items():
        planes = split.images.transpose(0, 3, 1, 2).reshape(len(split), -1)
        records = np.concatenate([split.labels[:, None].astype(np.uint8), planes], 1)
        parts = np.array_split(records, 5) if name == "train" else [records]
        for number, part in enumerate(parts, 1):
            file = f"data_batch_{number}.bin" if name == "train" else "test_batch.bin"
            (folder / file).write_bytes(part.tobytes())
    return folder


def write_solutions(folder: Path, splits: Splits | None = None) -> Path:
    """Write Kaggle's archive of the pictures, or of photographs if `splits` is None."""
    if splits is None:
        return write_tree(folder, classes=3, images=3, val=5, size=SIZE)
    for name, split in splits.items():
        rows = []
        for row, label in enumerate(split.labels.tolist()):
            image_id = f"{synset(label)}_{row}" if name == "train" else f"ILSVRC2012_val_{row + 1:08d}"
            place = IMAGES / name / (synset(label) if name == "train" else "")
            put(folder / place / f"{image_id}.JPEG", split.encoded(row))
            rows.append((image_id, f"{synset(label)} 1 1 9 9 "))
        write_csv(folder / f"LOC_{name}_solution.csv", rows)
    (folder / "LOC_synset_mapping.txt").write_text("".join(f"{synset(i)} {name}\n" for i, name in enumerate(CLASSES)))
    return folder


def write_folders(folder: Path, splits: Splits | None = None, kind: str = "png") -> Path:
    """Write a folder of pictures for each class."""
    for name, split in (splits or pictures()).items():
        for row, label in enumerate(split.labels):
            put(folder / name / CLASSES[label] / f"{row:02d}.{kind}", split.encoded(row, kind))
    return folder


def write_listing(folder: Path, splits: Splits) -> Path:
    """Write CSV files that list images."""
    for name, split in splits.items():
        files = [f"{name}-images/{row}.bmp" for row in range(len(split))]
        lines = [f"{CLASSES[label]},{file}" for label, file in zip(split.labels, files, strict=True)]
        put(folder / f"{name}.csv", "\n".join(["label,path", *lines, ""]).encode())
        for row, file in enumerate(files):
            put(folder / file, split.encoded(row, "bmp"))
    return folder


def write_parquet(folder: Path, splits: Splits) -> Path:
    """Write Parquet as `datasets` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for name, split in splits.items():
        cells = [{"bytes": split.encoded(row), "path": None} for row in range(len(split))]
        table = pa.table({"image": pa.array(cells, cell), "label": pa.array(split.labels)})
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        file = folder / "data" / f"{'train' if name == 'train' else 'validation'}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(metadata), file, row_group_size=4)
    return folder


def write_hub(folder: Path, splits: Splits) -> Path:
    """Write a data set of the library `datasets` by `save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])})
    named = {"train": "train", "val": "validation"}
    made = datasets.DatasetDict()
    for name, split in splits.items():
        cells = [{"bytes": split.encoded(row), "path": None} for row in range(len(split))]
        made[named[name]] = datasets.Dataset.from_dict({"image": cells, "label": split.labels}, features=features)
    made.save_to_disk(str(folder))
    return folder


def write_tars(folder: Path, splits: Splits) -> Path:
    """Write two tar files of WebDataset for each split; a label is a number in a file of its own or in JSON."""
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    for name, split in splits.items():
        for shard, rows in enumerate(np.array_split(np.arange(len(split)), 2)):
            file = folder / f"{name}-{shard:06d}.tar"
            with tarfile.open(file, "w") as tar:
                for row in rows.tolist():
                    label = str(split.labels[row])
                    fields = {"cls": label.encode()} if row % 2 else {"json": b'{"label": %b}' % label.encode()}
                    add_to_tar(tar, f"images/{row:04d}", {**fields, "png": split.encoded(row)})
                end = tar.offset + 2 * tarfile.BLOCKSIZE
            # The padding after the end of the archive is longer than these images.
            os.truncate(file, end)
    return folder


def add_to_tar(tar: tarfile.TarFile, key: str, fields: dict[str, bytes]) -> None:
    """Add a sample of WebDataset: a file for each field."""
    for suffix, content in fields.items():
        member = tarfile.TarInfo(f"{key}.{suffix}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def write_packed(folder: Path, splits: Splits | None = None) -> Path:
    """Write a packed data set, whose images are JPEG."""
    tree = write_solutions(folder.with_name("unpacked"), splits)
    pack(dict(open_splits(DataConfig(path=str(tree)))), folder, PackOptions(short_side=SIZE))
    return folder


@functools.cache
def _builder() -> Any:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()

    class SmallSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        written: Splits

        def _info(self) -> Any:
            kind = tfds.features.Image(shape=(None, None, 3), encoding_format="png")
            features = {"image": kind, "label": tfds.features.ClassLabel(names=[*CLASSES])}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager: Any) -> Any:
            named = {"train": "train", "val": "validation"}
            return {named[name]: self._generate_examples(split) for name, split in self.written.items()}

        def _generate_examples(self, split: Any) -> Any:
            for row, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
                yield row, {"image": image, "label": int(label)}

    return tfds, SmallSet


def write_tfds(folder: Path, splits: Splits, file_format: str) -> Path:
    """Prepare a set of tensorflow-datasets in a folder, its data_dir."""
    tfds, builder = _builder()
    builder.written = splits
    made = builder(data_dir=str(folder), file_format=file_format)
    made.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
    return folder


def example_tables(data: DataConfig) -> tuple[ExampleTable, ExampleTable]:
    """Open both splits of a data set in files."""
    train, val = open_splits(data).values()
    assert isinstance(train, ExampleTable) and isinstance(val, ExampleTable)
    return train, val


def refusal(data: DataConfig) -> str:
    """Return the one-line error of opening a data set and of reading its images."""
    with pytest.raises(InputError) as caught:
        for table in open_splits(data).values():
            [table.read(row) for row in range(len(table))]  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@dataclass(frozen=True)
class Form:
    """One format of data sets: its writer, and its differences from other formats."""

    format: str
    write: Callable[[Path, Splits], Path]
    in_memory: bool = False
    """Whether the source is an `ArrayTable`."""
    size: int = SIZE
    exact: bool = True
    """Whether decoded pixels equal the given ones; otherwise they equal those of the files."""
    ordered: bool = True
    """Whether rows are in the order in which they were written."""
    address: str | None = None
    """The value of `data.path` if the folder is `data.data_dir`."""

    def data(self, path: Path, **more: Any) -> DataConfig:
        at = {"path": str(path)} if self.address is None else {"path": self.address, "data_dir": str(path)}
        return DataConfig(**{**at, "image_size": self.size, "resize": self.size, "crop": "whole", **more})


FORMS: dict[str, Form] = {
    "solution files": Form("ilsvrc", write_solutions),
    **{
        f"folders of {kind}": Form("folders", functools.partial(write_folders, kind=kind))
        for kind in ("png", "bmp", "tiff", "webp", "ppm")
    },
    "CSV": Form("csv_listing", write_listing),
    "Parquet": Form("parquet_files", write_parquet),
    **{
        f"TFDS, {kind}": Form(
            "tfds", functools.partial(write_tfds, file_format=kind), ordered=False, address="tfds:small_set"
        )
        for kind in ("tfrecord", "array_record")
    },
    "Hugging Face": Form("hugging_face", write_hub),
    "WebDataset": Form("webdataset", write_tars),
    "packed": Form("packed_records", write_packed, exact=False),
    "IDX": Form("idx", write_idx, in_memory=True),
    "CIFAR": Form("cifar", write_cifar, in_memory=True, size=32),
    "NumPy": Form("numpy_files", write_npz, in_memory=True),
}
