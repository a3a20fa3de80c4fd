"""Reads image classification sets that tensorflow-datasets has prepared on disk.

    DATA_DIR/<name>[/<config>]/<version>/{dataset_info.json,features.json,<name>-train.tfrecord-00000-of-00004,...}

Nothing is downloaded, and no image is decoded here: the input stream reads encoded images. TFRecord files are read
at the offset of a record; ArrayRecord files are read through the data source of tensorflow-datasets. `data.train` and
`data.val` name other splits.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, counted, first_line, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.splits import required_split
from jaxddp.data.source import Split
from jaxddp.data.storage.shards import ArrayRecords, Contents, RecordFiles, load_or_build_index, record_columns
from jaxddp.data.storage.store import LocalFiles, check_regular
from jaxddp.data.storage.tables import REFUSED
from jaxddp.data.table import ExampleTable

_PREFIX = "tfds:"
_DATA = DataConfig()


def read_tfds(
    name: str, split: Split, data_dir: Path | str | None = None, refuse: Refuse = raise_fault, data: DataConfig = _DATA
) -> ExampleTable:
    """Read the examples of one split of a prepared data set.

    The first call reads the label of every record, and saves an index; see `load_or_build_index`. Ids are those of
    tensorflow-datasets, such as `cifar10-train.tfrecord-00000-of-00001__17`. Class ids and names are the names of the
    data set's classes. A file that is missing or cut short is rejected, and so are records without labels.

    Args:
        name: `cifar10`, `cifar10:3.0.2` or `name/config`.
        split: "val" is the validation split or, without one, the test split.
        data_dir: the folder of prepared data sets; by default TFDS_DATA_DIR, or ~/tensorflow_datasets.
        refuse: called with a message for each fault; by default it raises an error.
        data: a config whose keys `train` and `val` name other splits.

    Raises:
        InputError: the data set is missing (the message holds the command that prepares it), is not for image
            classification or lacks the split; or no record can be used.
    """
    # The import takes half a second. None of the functions that are called here imports TensorFlow.
    import tensorflow_datasets as tfds

    builder = _open_builder(tfds, name, data_dir)
    root, info = Path(builder.data_dir), builder.info
    image, label = _feature_names(tfds.features, root, info.features)
    of_set = required_split(root, info.splits, split, data)
    files_of_split = zip(info.splits[of_set].filenames, info.splits[of_set].shard_lengths, strict=True)
    # The file of a shard without records need not exist.
    lengths = {str(file): int(length) for file, length in files_of_split if length}
    if not lengths:
        raise InputError(f"{root}: the split {of_set} holds no example; prepare the data set again")
    names = tuple(info.features[label].names)
    check_distinct(names, lambda name: f"{root}: the names of {label}")
    store = _open_store(tfds, builder, of_set, lengths, image)

    def read(file: str, size: int) -> Contents:
        offsets, labels = store.labels(file, lengths[file], label)
        faults, wrong = [], np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            known = f"one of the {counted(len(names), 'class')} ({len(wrong)} such records in this file)"
            where = store.name(os.fsencode(file), int(offsets[wrong[0]]))
            faults = [f"{where}: the label {labels[wrong[0]]} is not {known}; choose a split with labels"]
            labels[wrong] = REFUSED
        return {"offset": offsets, "label": labels.astype(np.int32)}, faults

    about = f"{label} of {len(names)} in {[*lengths.values()]}"
    index = load_or_build_index(of_set, LocalFiles(root), [*lengths], about, read, refuse)
    paths = np.array([os.fsencode(file) for file in index])
    example_id, path, _ = record_columns(paths, [len(columns["label"]) for columns in index.values()])
    offset, labels = (np.concatenate([columns[name] for columns in index.values()]) for name in ("offset", "label"))
    table = ExampleTable(store, example_id, path, labels, names, offset=offset)
    return table.without(np.flatnonzero(labels == REFUSED))


def _open_builder(tfds: Any, name: str, data_dir: Path | str | None) -> Any:
    """Return the data set, of the highest version that is prepared, from its files only, without its own code."""
    # This is also the default folder of tensorflow-datasets.
    home = files.expanded(data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).absolute()
    folders = [file.parent for depth in ("*/*", "*/*/*") for file in home.glob(f"{depth}/features.json")]
    folders.sort(key=lambda folder: (folder.parent, [*map(int, re.findall("[0-9]+", folder.name))]))
    versions = {f"{folder.parent.relative_to(home).as_posix()}:{folder.name}": folder for folder in folders}
    # A name without a config opens the only config that is prepared.
    forms = {version: (version, version.rpartition(":")[0], version.partition("/")[0]) for version in versions}
    found = [folder for version, folder in versions.items() if name in forms[version]]
    if len({folder.parent for folder in found}) != 1:
        prepared = [*dict.fromkeys(one if ":" in name else one.rpartition(":")[0] for one in versions)]
        hint = f"prepared there: {', '.join(prepared)}" if prepared else "nothing is prepared there"
        fault = f"{home}: no prepared data set {show(name)}{nearest(name, prepared)}; {hint}"
        command = f"tfds.builder({name!r}, data_dir='{home}').download_and_prepare()"
        raise InputError(f'{fault}; to prepare it: python -c "import tensorflow_datasets as tfds; {command}"')
    check_regular(found[-1], "prepare the data set again")
    try:
        classes = _classes_of(files.read(found[-1] / "features.json"))
        # The library imports the module of a class, which may be a file of the data set.
        if not (foreign := [one for one in classes if not one.startswith("tensorflow_datasets.")]):
            return tfds.builder_from_directory(str(found[-1]))
    # The library documents no exception types for a damaged description.
    except Exception as error:
        raise InputError(f"{found[-1]}: cannot be opened ({first_line(error)}); prepare the data set again") from None
    fault = f"{found[-1]}: a feature is of the class {show(foreign[0])}, and code of a data set is not run"
    raise InputError(f"{fault}; prepare it with classes of tensorflow-datasets")


def _classes_of(content: Any) -> Iterator[str]:
    """Yield the names of the classes in the content of features.json, in which a text may be JSON, too."""
    with suppress(TypeError, ValueError):
        content = files.parse_json(content)
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        is_class = isinstance(value, str) and key in ("type", "pythonClassName", "python_class_name")
        yield from [value] if is_class else _classes_of(value)


def _feature_names(kinds: Any, root: Path, features: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the image and label features. Raises: InputError if there is not exactly one of each."""
    top = dict(features.items()) if isinstance(features, kinds.FeaturesDict) else {}
    images = [name for name, kind in top.items() if isinstance(kind, kinds.Image) and kind.np_dtype == np.uint8]
    labels = [name for name, kind in top.items() if isinstance(kind, kinds.ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        named = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in sorted(top.items()))
        advice = "choose one with a single Image of 8 bits and a single ClassLabel"
        raise InputError(f"{root}: not a data set of images; its features are {named or 'none'}; {advice}")
    return images[0], labels[0]


def _open_store(
    tfds: Any, builder: Any, split: str, lengths: Mapping[str, int], image: str
) -> RecordFiles | ArrayRecords:
    root, kind = Path(builder.data_dir), builder.info.file_format.value
    if kind == "tfrecord":
        return RecordFiles(LocalFiles(root), image)
    if kind != "array_record":
        raise InputError(f"{root}: files of the format {kind}; prepare the data set as tfrecord or array_record")
    source = builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    starts = accumulate(lengths.values(), initial=0)
    return ArrayRecords(LocalFiles(root), source, dict(zip(map(os.fsencode, lengths), starts, strict=False)), image)


class PreparedSets:
    """The format of addresses with the prefix tfds:, and of the folder of a version (imagenet2012/5.1.0)."""

    description = f"{_PREFIX}NAME (a prepared data set of tensorflow-datasets)"

    def match(self, place: Place) -> Match:
        is_version = place.local is not None and (place.local / "features.json").is_file()
        return Match.NAMED if is_version or place.address.startswith(_PREFIX) else Match.NONE

    def divided(self, place: Place) -> bool:
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        name, data_dir = place.address.removeprefix(_PREFIX), place.data.data_dir
        if place.local is not None:
            name, data_dir = f"{place.local.parent.name}:{place.local.name}", place.local.parents[1]
        return read_tfds(name, split, data_dir, place.refuse, place.data).select(place.data.classes)


FORMATS.add("tfds")(PreparedSets())
