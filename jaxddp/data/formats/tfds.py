"""Reads image classification sets that tensorflow-datasets has prepared on disk.

    DATA_DIR/<name>[/<config>]/<version>/{dataset_info.json,features.json,<name>-train.tfrecord-00000-of-00004,...}

Nothing is downloaded, and no image is decoded: the stream gets the encoded images of the files. TFRecord files are read
at the offset of a record; ArrayRecord files are read through the data source of tensorflow-datasets.
"""

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.private_names as private_names
from jaxddp.core.errors import InputError
from jaxddp.core.files import open_regular, reading
from jaxddp.core.wording import counted, first_line, nearest, show
from jaxddp.data.faults import Refuse, at_once, check_apart
from jaxddp.data.format import Match, Place
from jaxddp.data.source import Split
from jaxddp.data.storage.record_index import RecordIndex, kept_index
from jaxddp.data.storage.records import ArrayRecords, RecordFiles, record_columns
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS

_PREFIX = "tfds:"
_SPLITS = {"train": ("train",), "val": ("validation", "test")}
_REFUSED = -1
"""Marks a rejected record in place of its label."""
# Reading labels mostly waits for the disk or a server.
_THREADS = 16


def read_tfds(
    name: str, split: Split, data_dir: str | PathLike[str] | None = None, refuse: Refuse = at_once
) -> ExampleTable:
    """Reads the examples of one split of a prepared set.

    The first time, the label of every record is read, and an index is saved; see `kept_index`. Ids are those of
    tensorflow-datasets, `cifar10-train.tfrecord-00000-of-00001__17`. Class ids and names are the names of the set's
    classes. A file that is missing or cut short is rejected, and so are records without labels.

    Args:
        name: `cifar10`, `cifar10:3.0.2` or `name/config`.
        split: "val" is the set's validation split, or else its test split.
        data_dir: the folder of prepared sets; by default TFDS_DATA_DIR, or ~/tensorflow_datasets.
        refuse: called with a message for each fault; by default it raises an error.

    Raises:
        InputError: the set is missing (with the command that prepares it), is not for image classification, has no such
            split, or no record is left.
    """
    shards = _shards(_builder(name, data_dir), split)
    store = _store(shards)
    index = _refusing_index(shards, store, refuse)
    files = np.array([os.fsencode(file) for file in shards.files])
    example_id, path, _ = record_columns(files, shards.lengths)
    names = shards.class_names
    table = ExampleTable(store, example_id, path, index.label, names, offset=index.offset, made_of="record")
    return table.without(np.flatnonzero(index.label == _REFUSED).tolist())


@dataclass(frozen=True)
class _Shards:
    """The files of one split, and the names of the features of their images and labels."""

    builder: Any
    split: str
    root: Path
    files: tuple[str, ...]
    lengths: tuple[int, ...]
    """The number of records in each file, from the set's description."""
    image: str
    label: str
    class_names: tuple[str, ...]


def _library() -> Any:
    # This must be the first import of TensorFlow, to silence TensorFlow and keep it from allocating GPUs.
    from jaxddp.data.stream import tensorflow_cpu  # noqa: F401

    # Without this variable, TensorFlow makes a network request to find out whether it runs on Google's machines.
    os.environ.setdefault("NO_GCE_CHECK", "true")
    import tensorflow_datasets

    return tensorflow_datasets


def _builder(name: str, data_dir: str | PathLike[str] | None) -> Any:
    tfds = _library()
    # This is also the default folder of tensorflow-datasets.
    home = Path(data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser().absolute()
    _check_regular(home / re.split("[/:]", name)[0])
    try:
        return _opener(tfds)(name, data_dir=str(home))
    except tfds.core.DatasetNotFoundError:
        raise _not_prepared(name, home) from None
    # The library documents no error for a damaged description or an invalid name.
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise InputError(
            f"{home}: the set {show(name)} cannot be opened ({reason}); write name, name/config or name:1.0.0, or "
            "prepare the set again"
        ) from None


def _check_regular(folder: Path) -> None:
    """Checks the files of a set, since the library would wait for a FIFO. Raises: InputError if one is not regular."""
    for file in sorted(path for path in folder.rglob("*") if path.exists() and not path.is_dir()):
        with reading(file, "prepare the set again"):
            open_regular(file).close()


def _opener(tfds: Any) -> Callable[..., Any]:
    """Returns a function that opens a prepared set from its files. The public `tfds.builder` runs the set's code."""
    opener = private_names.function(
        getattr(tfds.core, "read_only_builder", None), "builder_from_files", ["name"], ["builder_kwargs"]
    )
    if opener is None:
        lost = "a set of TensorFlow Datasets is opened through the code that made it, which may need more packages"
        private_names.warn_missing(
            "tensorflow-datasets", "tensorflow_datasets.core.read_only_builder.builder_from_files", lost
        )
        return tfds.builder
    return opener


def _not_prepared(name: str, home: Path) -> InputError:
    features = [*home.glob("*/*/features.json"), *home.glob("*/*/*/features.json")]
    places = sorted(file.parent.relative_to(home) for file in features)
    version = ":" in name
    prepared = [place.parent.as_posix() + f":{place.name}" * version for place in places]
    hint = f"prepared there: {', '.join(dict.fromkeys(prepared))}" if prepared else "nothing is prepared there"
    return InputError(
        f"{home}: no prepared set {show(name)}{nearest(name, prepared)}; {hint}; to prepare it: python -c "
        f"\"import tensorflow_datasets as tfds; tfds.builder({name!r}, data_dir='{home}').download_and_prepare()\""
    )


def _shards(builder: Any, split: Split) -> _Shards:
    root = Path(builder.data_dir)
    image, label = _features(root, builder.info.features)
    splits = builder.info.splits
    name = next((name for name in _SPLITS[split] if name in splits), None)
    if name is None:
        wanted, existing = " or ".join(_SPLITS[split]), ", ".join(splits) or "none"
        raise InputError(f"{root}: no split {wanted}; the set has: {existing}; choose a set with one")
    info = splits[name]
    # The file of a shard without records need not exist.
    lengths = {str(file): int(n) for file, n in zip(info.filenames, info.shard_lengths, strict=True) if n}
    if not lengths:
        raise InputError(f"{root}: the split {name} holds no example; prepare the set again")
    class_names = tuple(builder.info.features[label].names)
    check_apart(class_names, lambda name: f"{root}: the names of {label}")
    return _Shards(builder, name, root, tuple(lengths), tuple(lengths.values()), image, label, class_names)


def _features(root: Path, features: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the names of the image and label features. Raises: InputError if there is not exactly one of each."""
    kinds = _library().features
    top = dict(features.items()) if isinstance(features, kinds.FeaturesDict) else {}
    images = [name for name, kind in top.items() if isinstance(kind, kinds.Image) and kind.np_dtype == np.uint8]
    labels = [name for name, kind in top.items() if isinstance(kind, kinds.ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        named = [f"{name} ({type(kind).__name__})" for name, kind in sorted(top.items())]
        listed = ", ".join(named) or type(features).__name__
        raise InputError(
            f"{root}: not a set of images with one class each; its features are {listed}; choose one with a single "
            "Image of 8 bits and a single ClassLabel"
        )
    return images[0], labels[0]


def _store(shards: _Shards) -> RecordFiles | ArrayRecords:
    tfds, kind = _library(), shards.builder.info.file_format.value
    if kind == "tfrecord":
        return RecordFiles(shards.root, shards.image)
    if kind != "array_record":
        raise InputError(f"{shards.root}: files of the format {kind}; prepare the set as tfrecord or array_record")
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    source = shards.builder.as_data_source(shards.split, deserialize_method=raw)
    starts = np.cumsum((0, *shards.lengths[:-1])).tolist()
    first = dict(zip(map(os.fsencode, shards.files), starts, strict=True))
    return ArrayRecords(shards.root, source, first, shards.image)


def _refusing_index(shards: _Shards, store: RecordFiles | ArrayRecords, refuse: Refuse) -> RecordIndex:
    """Returns the saved index, or builds and saves one. An index with faults is not saved; faults are shown again."""
    about = f"{shards.label} of {len(shards.class_names)} in {shards.lengths}"
    try:
        return kept_index(shards.split, shards.root, shards.files, about, lambda: _index(shards, store, at_once))
    except InputError:
        if refuse is at_once:
            raise
    return _index(shards, store, refuse)


def _index(shards: _Shards, store: RecordFiles | ArrayRecords, refuse: Refuse) -> RecordIndex:
    """Builds the index; rejected records have the label `_REFUSED`. Raises: InputError if `refuse` raises it."""

    def look(file: str, length: int) -> tuple[np.ndarray, np.ndarray] | InputError:
        try:
            return store.labels(os.fsencode(file), length, shards.label)
        except InputError as error:
            return error

    offsets, labels, whole = [], [], []
    with ThreadPoolExecutor(_THREADS) as pool:
        for length, result in zip(shards.lengths, pool.map(look, shards.files, shards.lengths), strict=True):
            whole.append(np.full(length, not isinstance(result, InputError)))
            if isinstance(result, InputError):
                refuse(str(result))
                result = np.zeros(length, np.int64), np.full(length, _REFUSED)
            offsets.append(result[0])
            labels.append(result[1])
    offset, label, whole = map(np.concatenate, (offsets, labels, whole))
    wrong = np.flatnonzero(whole & ((label < 0) | (label >= len(shards.class_names))))
    if len(wrong):
        place = int(np.searchsorted(np.cumsum(shards.lengths), wrong[0], side="right"))
        name = store.name(os.fsencode(shards.files[place]), int(offset[wrong[0]]))
        refuse(
            f"{name}: the label {label[wrong[0]]} is not one of the {counted(len(shards.class_names), 'class')} "
            f"({len(wrong)} such records); choose a split with labels"
        )
        label[wrong] = _REFUSED
    return RecordIndex(offset, label.astype(np.int32))


class PreparedSets:
    """The format of addresses that begin with tfds:."""

    description = f"{_PREFIX}NAME (a prepared set of tensorflow-datasets)"

    def match(self, place: Place) -> Match:
        return Match.NAMED if place.address.startswith(_PREFIX) else Match.NONE

    def divided(self, place: Place) -> bool:
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        table = read_tfds(place.address.removeprefix(_PREFIX), split, place.data.data_dir, place.refuse)
        return table.select(place.data.classes)


FORMATS.add("tfds")(PreparedSets())
