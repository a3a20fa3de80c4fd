"""`data.path` becomes a training and a validation table: what lies there decides how it is read.

| path | form |
|---|---|
| a directory, or a URL (`s3://`, `gs://`, `https://`), with LOC_train_solution.csv | Kaggle's ILSVRC archive |
| a directory with packed.json | made by `jaxddp data pack` |
| a directory with train-images-idx3-ubyte | IDX files: MNIST, Fashion-MNIST |
| a directory with batches.meta.txt or fine_label_names.txt | CIFAR-10 or CIFAR-100, binary version |
| a directory with train_images.npy, or one .npz file | NumPy arrays |
| a directory with train/CLASS/IMAGE and val/CLASS/IMAGE | a folder a class |
| `tfds:NAME` | a prepared set of tensorflow-datasets, in `data.data_dir` |
"""

from pathlib import Path

from jaxddp.config import DataConfig
from jaxddp.data import catalog
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.formats import cifar, folders, idx, numpy_files, packed
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.source import Split
from jaxddp.data.storage.home import is_url, permitted
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError

Table = ExampleTable | ArrayTable

_FORMS = (
    "LOC_train_solution.csv (Kaggle's archive), packed.json (`jaxddp data pack`), train/CLASS/IMAGE and "
    "val/CLASS/IMAGE, train-images-idx3-ubyte, CIFAR's binary files or train_images.npy; or an .npz file, a URL, or "
    "tfds:NAME"
)
_IN_MEMORY = (
    (idx.holds_idx, idx.read_idx),
    (cifar.holds_cifar, cifar.read_cifar),
    (numpy_files.holds_numpy, numpy_files.read_numpy),
)
_OF_FILES = ((packed.holds_packed, packed.read_packed), (folders.holds_folders, folders.read_folders))


def open_tables(data: DataConfig) -> tuple[Table, Table]:
    """The training and the validation table that a config names, every image seen to be there.

    Raises:
        InputError: neither a path nor a name, both, or whatever is wrong with the data.
    """
    train_table, val_table = open_splits(data).values()
    if data.limit is not None:
        train_table = train_table.take(data.limit)
    for table in (train_table, val_table):
        if isinstance(table, ArrayTable):
            _check_sizes(table, data)
        else:
            table.check_images()
    return train_table, val_table


@permitted()
def open_splits(data: DataConfig) -> dict[str, Table]:
    """The tables of "train" and "val" as they lie there: whole but for the classes selected, and not looked through.

    Raises:
        InputError: neither a path nor a name, both, or whatever is wrong with the data.
    """
    entry = _entry(data)
    splits: tuple[Split, Split] = ("train", "val")
    return {split: _open_split(entry, split, data) for split in splits}


def _open_split(entry: catalog.DatasetEntry, split: Split, data: DataConfig) -> Table:
    classes = data.classes or entry.classes
    if entry.path.startswith(catalog.TFDS):
        # tensorflow-datasets takes seconds to import.
        from jaxddp.data.formats.tfds import read_tfds

        return read_tfds(entry.path.removeprefix(catalog.TFDS), split, data.data_dir, classes)
    if not is_url(entry.path):
        root = Path(entry.path).expanduser().absolute()
        solutions = root / ((data.train or entry.train) if split == "train" else (data.val or entry.val))
        if not solutions.is_file() and not (data.train or data.val):
            for holds, read in _IN_MEMORY:
                if holds(root):
                    return read(root, split).select(classes)
            for holds, read in _OF_FILES:
                if holds(root):
                    return read(root, split, classes)
            if root.is_dir() and not any(any(root.glob(near)) for near in ("LOC_*", "*/LOC_*", "../LOC_*")):
                raise InputError(f"{root}: holds no data set of a known form; give a directory with {_FORMS}")
    if split == "train":
        return train_solutions(entry.path, data.train or entry.train, classes, cache=data.local_cache)
    return val_solutions(entry.path, data.val or entry.val, classes, cache=data.local_cache)


def _entry(data: DataConfig) -> catalog.DatasetEntry:
    if (data.path is None) == (data.name is None):
        raise InputError(
            "data: give one of data.path (a folder, a URL or tfds:NAME) and data.name (in datasets.toml); "
            f"now data.path={data.path!r}, data.name={data.name!r}"
        )
    return catalog.DatasetEntry("", data.path or "") if data.name is None else catalog.resolve(data.name)


def _check_sizes(table: ArrayTable, data: DataConfig) -> None:
    """What the config says of sizes and crops must be true of images that nothing resizes."""
    height, width, _ = table.image_shape
    if height != width:
        raise InputError(f"these images are {height}x{width}, in memory; make them square, or put them into files")
    if (height, width) != (data.image_size, data.image_size):
        raise InputError(
            f"data.image_size={data.image_size}: these images are {height}x{width} and, in memory, stay so; set "
            f"data.image_size {height}"
        )
    if data.crop != "whole":
        raise InputError(f"data.crop={data.crop}: these images are in memory, whole; set data.crop whole")
