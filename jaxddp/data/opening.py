"""Opens data: the splits of a config, with the format that best matches its path, or unlabelled images.

The modules of `jaxddp/data/formats/` register the formats in `FORMATS`; see `jaxddp.data.format` to add a format.
"""

import dataclasses
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.config.data_section import TABLE_KEYS
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, Key, Option, about, counted, show, some
from jaxddp.core.phases import doing
from jaxddp.data.division import GROUPS, check_disjoint, digest64, grouped, held_out, one_fold
from jaxddp.data.faults import Refuse, find_repeats, pass_faults_to, raise_fault
from jaxddp.data.format import Format, Match, Place, check_unset
from jaxddp.data.formats.csv_listing import has_labels, is_csv, read_paths
from jaxddp.data.formats.folders import is_folder, is_image_name, visible_entries, visible_folders
from jaxddp.data.formats.ilsvrc import TEST_CSV, test_listing
from jaxddp.data.formats.splits import SPLITS
from jaxddp.data.manifest import ImageManifest, compare_with_manifest, find_manifest
from jaxddp.data.order import ChosenOrder, permutation
from jaxddp.data.source import Source, Split, Splits, Table, check_one_label, labels_of
from jaxddp.data.storage import root
from jaxddp.data.storage.root import convert_os_errors, is_url
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable
from jaxddp.data.united import in_classes

TRAIN = "train"
"""The value of `data.unlabelled` for the training images."""
_AS_ARRAYS = "save the arrays of {} as .npz, with train_images, train_labels, val_images and val_labels"
_AS_IMAGES = "write the images of {} to class folders or .tar files"
_LISTED = "list the images that {} describes in train.csv, with the columns path,label"
_UNREAD = {
    "cifar-10-batches-py cifar-100-python": "{} holds pickles, which are never read; get it by `jaxddp data get`",
    ".zip .gz .tgz .bz2 .xz .7z .rar .tar": "unpack {}, and give its folder",
    ".h5 .hdf5 .mat .pkl .pickle .npy": _AS_ARRAYS,
    ".tfrecord .tfrec .mdb .lmdb .rec": _AS_IMAGES,
    ".dcm .nii": "convert {} and its like to PNG or TIFF",
    ".xls .xlsx": "save {} as CSV",
    ".json .xml .csv .tsv .yaml": _LISTED,
}
"""What to do with files that no format reads, by the end of their names."""
_MOST_FOLDERS = 30
"""A directory with more folders is not searched for data sets below it."""
_MOST_FILES = 1000
"""The number of files whose names are looked at for a hint."""
_log = logging.getLogger("jaxddp.data")


def open_tables(data: DataConfig, val_limit: int | None = None) -> tuple[Table, Table]:
    """Open and check the training and validation data of a config; `val_limit` limits the validation examples.

    Raises: see `open_splits` and `Table.check`.
    """
    train, val = open_unchecked(data, val_limit)
    with doing("looking for the images"):
        train.check(data)
        val.check(data)
    return train, val


def open_unchecked(data: DataConfig, val_limit: int | None = None) -> tuple[Table, Table]:
    """Open the data like `open_tables`, without checking that the images exist. Raises: see `open_splits`."""
    train, val = open_full_splits(data).values()
    train = train if data.limit is None else train.take(data.limit)
    return train, val if val_limit is None else val.take(val_limit)


class RunData(NamedTuple):
    """The data of a run, to which the data of an evaluation are compared."""

    fingerprints: Collection[str] = ()
    """The fingerprints of its splits; none if they are not known."""
    is_elsewhere: bool = False
    """Whether the evaluated data have another location."""

    def has_changed(self, data: DataConfig, *tables: Table) -> bool:
        """Return whether tables at the run's location, from which images are held out, are not those of the run.

        They are divided anew, so images on which the run has trained may be held out.
        """
        is_known = self.fingerprints and not self.is_elsewhere and data.held_out is not None
        return bool(is_known) and {table.fingerprint for table in tables}.isdisjoint(self.fingerprints)


def open_evaluated(
    data: DataConfig, val_limit: int | None, of_run: RunData, classes: Sequence[tuple[str, ...]] = (), form: str = ""
) -> tuple[Table, Table]:
    """Open the data of an evaluation: the labelled training examples, and the validation split, at most `val_limit`.

    A run that held out images may be evaluated on other data. Their validation split, or else all of them, is both.
    Other data may have only some of the run's classes, unless they are arrays, whose classes may be mere numbers.

    `classes` are the ids and the names of the run's classes, and `form` that of its labels, if they are known.
    """
    known = of_run.fingerprints if of_run.is_elsewhere else ()
    train, val = (in_form(table, form) for table in _open_evaluated(data, val_limit, known))
    if of_run.has_changed(data, train, val):
        _log.warning("%s: changed since the run, which may have trained on images that are measured", data.path)
    is_mapped = known and classes and train.pixel_shape is None and labels_of(train).form != "numbers"
    if is_mapped and {*train.class_ids} <= {*classes[0]}:
        train, val = (cast(Table, in_classes(table, *classes)) for table in (train, val))
    return train, val


def _open_evaluated(data: DataConfig, val_limit: int | None, known: Collection[str]) -> tuple[Table, Table]:
    try:
        train, val = open_unchecked(data, val_limit)
        if data.labels_per_class is not None:
            train = few_labels(train, data.labels_per_class, data.labels_seed)
        if not known or data.held_out is None or train.fingerprint in known or val.fingerprint in known:
            return train, val
    except InputError:  # Other data may have a validation split, or too few images to hold some out.
        if not known:
            raise
    of_training = dict.fromkeys(("val_share", "fold", "group_column", "weight_column"))
    whole = open_validation_split(dataclasses.replace(data, **of_training))
    val = whole if val_limit is None else whole.take(val_limit)
    _log.info("%s: other data than the run's; %s are measured", data.path or data.name, counted(len(val), "image"))
    return val, val


@convert_os_errors()
def open_full_splits(data: DataConfig) -> Splits:
    """Open both splits without limits, and with `data.verify=manifest`, compare the images with a manifest.

    Raises: see `open_splits` and `compare_with_manifest`.
    """
    return _compared(open_splits(data), _place(data))


def _compared(splits: Splits, place: Place) -> Splits:
    if place.data.verify != "manifest":
        return splits
    file = find_manifest(place.address, place.data.manifest)
    with doing(f"reading {file.name}"):
        return compare_with_manifest(splits, ImageManifest.read(file), place.data)


def _with_equal_labels(splits: Splits) -> Splits:
    """Return the splits with multi-hot labels if an example of any split has not one class, else with single labels.

    A listing has multi-hot labels if a row has several; other splits, or the selected classes, may have only one each.
    """
    listed = [labels_of(table) for table in splits.values() if table.pixel_shape is None]
    multi_hot = [labels.values for labels in listed if labels.form == "several labels"]
    if not multi_hot:
        return splits
    several = any((labels.sum(1) != 1).any() for labels in multi_hot)
    convert = ExampleTable.with_several_labels if several else ExampleTable.with_single_labels
    return {split: convert(cast(ExampleTable, table)) for split, table in splits.items()}


def in_form(table: Any, form: str) -> Any:
    """Return a table with the form of a network's labels: of several, each image of other data may have only one."""
    converts = form == "several labels" and isinstance(table, ExampleTable) and (table.labels >= 0).all()
    return table.with_several_labels() if converts else table


@contextmanager
def _reading() -> Iterator[None]:
    with convert_os_errors(), doing("reading the data set", noun="row"):
        yield


def open_validation_split(data: DataConfig) -> Table:
    """Open the validation split without its limit, or all images if there is none. The training split may be missing.

    Raises: see `open_full_splits`.
    """
    return _open_labelled(_place(data), data.group_column)


@_reading()
def _open_labelled(place: Place, group_column: str | None, split: Split | None = None) -> Table:
    """Open one split, without the other one if that is possible; by default, as `open_validation_split`.

    `group_column` is that of the config; that of the place is None if it names a function of `GROUPS`.
    """
    data_format, found = _recognized(place)
    is_divided = data_format.divided(found)
    if place.data.held_out is not None:
        return open_full_splits(dataclasses.replace(place.data, group_column=group_column))[split or "val"]
    if split == "val" and not is_divided:
        raise InputError(f"--split val: {place.address} has no validation split; leave it out for all images")
    split = (split or "val") if is_divided else "train"
    return _compared(_with_equal_labels({split: _open(data_format, found, split)}), place)[split]


def _open(data_format: Format, place: Place, split: Split) -> Table:
    """Open a split, and tell in `reading` which format read it, and which folder below that of the config."""
    table: Any = data_format.open(place, split)
    if not hasattr(table, "reading"):
        return table
    words = place.found.get("below", ""), table.reading or f"read as {place.found['format']}"
    return dataclasses.replace(table, reading=": ".join(filter(None, words)))


@_reading()
def open_splits(data: DataConfig, refuse: Refuse = raise_fault, *, undivided: bool = False) -> Splits:
    """Open "train" and "val" with the selected classes, without checking images.

    Labels are multi-hot if an image of either split has several labels.

    Args:
        refuse: a callback with the message about an unusable row, file or split. By default it raises an error. If it
            returns, the row, file or split is skipped.
        undivided: whether data without a validation split are "all", instead of an error.

    Raises:
        InputError: `data.path` and `data.name` are both set or both unset; a validation split and `data.val_share` both
            exist or are both missing; or the data have a fault.
    """
    data_format, place = _recognized(dataclasses.replace(_place(data), refuse=refuse))
    where = place.local or place.address
    if data_format.divided(place):
        if (key := data.held_out) is not None:
            _open(data_format, place, "train")  # A URL is recognized without a request, so nothing may be there.
            advice = ("leave ", Key(key.name), " out, which is for data without this split")
            raise InputError(key, f": {where} has its own validation split", advice=advice)
        opened: Splits = {}
        for split in SPLITS:
            # After a fault of one split, the other is still opened. But a file that the config names must be readable.
            with pass_faults_to(raise_fault if getattr(place.data, split) else refuse):
                opened[split] = grouped(_open(data_format, place, split), data.group_column)
        if not opened:
            raise InputError(f"{where}: no split can be read; correct the faults that are listed above")
        check_disjoint(opened, str(where))
    elif data.held_out is None and undivided:
        return {"all": _open(data_format, place, "train")}
    elif data.held_out is None:
        advice = ("give ", Key("data.val_share"), ", such as 0.1 to hold out a tenth of each class")
        raise InputError(f"{where}: has no validation split", advice=advice)
    else:
        whole = cast(ExampleTable, grouped(_open(data_format, place, "train"), data.group_column))
        fold, share = data.fold_of, cast(float, data.val_share)
        opened = {**(one_fold(whole, *fold) if fold else held_out(whole, share, str(where)))}
    if "train" in opened and data.targets != "numbers":
        _warn_of_classes(opened["train"])
    return _with_equal_labels(opened)


def _warn_of_classes(train: Table) -> None:
    """Log a warning if every image has the same classes, so that there is nothing to learn."""
    if train.num_classes == 1:
        advice = "so every prediction is right; give images of two classes or more"
        _log.warning("the only class is %s, %s", show(train.class_names[0]), advice)
    elif train.labels.ndim == 2 and (train.labels == 1).all():
        advice = "if the labels are lists of 0 and 1, write a column for each class"
        _log.warning("every training image has all of the classes %s; %s", some(train.class_names), advice)


@_reading()
def open_images(path: str, data: DataConfig) -> Table:
    """Open the images of all classes at another path: the training split of a data set, or unlabelled images.

    Images are not checked. Raises: InputError if there are no images, or the data have a fault.
    """
    place = _whole_place(path, data)
    # A CSV file may have no labels, so only its column of images is read.
    if is_csv(Path(path)) or not _is_data_set(place):
        return open_inputs([path], data)
    return _open(*_recognized(place), "train")


@convert_os_errors()
def open_one_split(paths: Sequence[str], data: DataConfig, split: Split | None = None) -> Table:
    """Open the images of a split of a data set, with labels, or unlabelled images; see `open_inputs`.

    If the path is that of the config, all settings of the config apply, such as `val_share`, except its limits.
    Otherwise the data set has all of its classes.

    Args:
        paths: the path of a data set, or paths of unlabelled images.
        split: the split; by default, the validation split, or all images if there is none.

    Raises: InputError if there are no images or no such split, or the data have a fault.
    """
    if not paths:
        return open_inputs(paths)
    path, *others = paths
    is_own = not others and _is_path_of(path, data)
    place = _place(data) if is_own else _whole_place(path, dataclasses.replace(data, val_share=None, fold=None))
    is_labelled = is_own or not is_csv(Path(path)) or has_labels(files.expanded(path).absolute(), place.data)
    is_set = is_own or (not others and _is_data_set(place))
    # A folder of class folders matches no other format.
    if not (is_set or others) and [*_matches(place)] == ["folders"]:
        loose = sum(is_image_name(entry.name) for entry in visible_entries(place.path))
        is_set = not loose
        if loose:
            _log.warning("%s: holds %s beside its folders, so these are no classes", path, counted(loose, "image"))
    if others or not is_labelled or not is_set:
        if split is not None:
            raise InputError(f"--split {split}: {path} is no data set with splits; leave it out")
        return open_inputs(paths, data)
    return _open_labelled(place, data.group_column, split)


def _is_path_of(path: str, data: DataConfig) -> bool:
    """Return whether a path is that of the config's data set."""
    own = data.path
    if data.name:
        with suppress(InputError):  # This machine may have no data set of that name.
            own = root.resolve(data.name).path
    return own is not None and os.path.realpath(files.expanded(path)) == os.path.realpath(files.expanded(own))


def _whole_place(path: str, data: DataConfig) -> Place:
    """Return the place of a data set with all of its classes."""
    changes: dict[str, Any] = {"path": path, **dict.fromkeys(("name", "train", "val", "classes", *TABLE_KEYS))}
    # Another table of this kind has the same columns, and other images.
    is_alike = is_csv(Path(path)) or all(str(each).endswith(".parquet") for each in (path, data.path))
    changes |= {"columns": ()} | (_table_keys(data) if is_alike else {})
    return Place(path, dataclasses.replace(data, **changes))


def _matches(place: Place) -> dict[str, Match]:
    """Return the formats that match a place, with the degrees of the matches."""
    matches = {name: FORMATS.get(name).match(place) for name in FORMATS.names()}
    return {name: match for name, match in matches.items() if match > Match.NONE}


def _is_data_set(place: Place) -> bool:
    matches = _matches(place)
    has_splits = [*matches] == ["folders"] and FORMATS.get("folders").divided(place)
    return has_splits or any(match >= Match.WHOLE for match in matches.values())


def _place(data: DataConfig) -> Place:
    if data.keys_of_process:
        key = data.keys_of_process[0]
        fault = " names data of each process, and one process reads them here"
        advice = f"give the data of one process, such as {data.of_process(0).path}"
        raise InputError(Key(f"data.{key}", getattr(data, key)), fault, advice=advice)
    if (data.path is None) == (data.name is None):
        places = Option("data.path"), " (a folder, a URL or tfds:NAME) or ", Option("data.name"), " (in datasets.toml)"
        raise InputError(f"{'no' if data.path is None else 'two sets of'} data are given", advice=("give ", *places))
    # A function of the path serves data of any format.
    data = dataclasses.replace(data, group_column=None) if data.group_column in GROUPS else data
    entry = root.DatasetEntry(data.path or "") if data.name is None else root.resolve(data.name)
    if not is_url(entry.path):
        check_unset(data, ["local_cache"], f"{entry.path} is on this machine and read in place")
    return Place(entry.path, entry.completed(data))


def _recognized(place: Place) -> tuple[Format, Place]:
    """Return the format of a data set, and its place: the given one, or that of the only data set below it."""
    matches, where = _matches(place), place.local or place.address
    if not _is_found(matches) and (below := _places_below(place)):
        if len(below) == 1:
            data_format, inner = _recognized(below[0])
            inner.found["below"] = f"{os.path.relpath(str(inner.local), str(where))}/"
            return data_format, inner
        both = " or ".join([inner.address for inner in below[:3]])
        both += " or ..." if len(below) > 3 else ""
        advice = ("give ", Option("data.path"), f" as {both}, or put all images of a class into one folder")
        raise InputError(f"{where}: holds {len(below)} data sets", advice=advice)
    if not matches:
        if place.local is not None and not place.local.exists():
            fault = f"{where}: no such directory or file{files.nearest_beside(place.local)}"
            raise InputError(fault, advice=("check ", Option("data.path")))
        descriptions = "; ".join(FORMATS.get(name).description for name in FORMATS.names())
        hint = _nearest_data_set(place) or f"; give one of: {descriptions}"
        raise InputError(f"{where}: holds no data set of a known format{hint}")
    names = [name for name, match in matches.items() if match is max(matches.values())]
    if len(names) > 1:
        both = f"{len(names)} formats, {' and '.join(names)}"
        raise InputError(f"{where}: holds data sets of {both}; give a directory with one of them, or a file")
    data_format, place.found["format"] = FORMATS.get(names[0]), names[0]
    without_effect = [key for key in TABLE_KEYS if key not in getattr(data_format, "keys", ())]
    check_unset(place.data, without_effect, f"is for tables of images, and {where} is of the format {names[0]}")
    return data_format, place


def _is_found(matches: Mapping[str, Match]) -> bool:
    return "folders" in matches or max(matches.values(), default=Match.NONE) >= Match.LIKELY


def _places_below(place: Place, depth: int = 4) -> list[Place]:
    """Return the data sets in the folders of a directory that is no data set itself: `pets/pets/`, `food/images/`."""
    if place.local is None or not place.local.is_dir() or not depth:
        return []
    folders = [place.local / name for name in sorted(visible_folders(place.local))]
    inner = [dataclasses.replace(place, address=str(path)) for path in folders if len(folders) <= _MOST_FOLDERS]
    return [one for each in inner for one in ([each] if _is_found(_matches(each)) else _places_below(each, depth - 1))]


def _nearest_data_set(place: Place) -> str:
    """Return a hint for an address that is no data set."""
    path = place.local
    if path is None:
        return "; a URL has two slashes, and is text: a Path drops one" if ":/" in place.address else ""
    names = [file.name for file in islice(chain([path], path.glob("*"), path.glob("*/*")), _MOST_FILES)]
    unread = ((advice, tuple(ends.split())) for ends, advice in _UNREAD.items())
    hint = next((f"; {advice.format(name)}" for advice, ends in unread for name in names if name.endswith(ends)), "")
    if path.is_file():
        return hint
    holds_images = any(map(is_image_name, os.listdir(path)))
    above = [dataclasses.replace(place, address=str(parent)) for parent in path.parents[:2]]
    # The folders above are not what the user names, so their own faults are not reported.
    with suppress(InputError, OSError):
        # A folder of a single class is no better than the images in it.
        is_class = holds_images and sum(entry.is_dir() for entry in os.scandir(path.parent)) > 1
        near = (at for at in above if _is_data_set(at) or (is_class and at is above[0] and "folders" in _matches(at)))
        hint = next((f"; {at.address} would open" for at in near), hint)
    listed = "" if hint else "; put them into a folder for each class, or list them in train.csv, with path,label"
    return f", but images without folders of classes{hint}{listed}" if holds_images else hint


def _table_keys(data: DataConfig) -> dict[str, Any]:
    return {key: getattr(data, key) for key in ("columns", "targets", "label_separator")}


@convert_os_errors()
def open_inputs(places: Sequence[str | os.PathLike[str]], data: DataConfig | None = None) -> ExampleTable:
    """Return a table of the images at some places, without opening them. Labels are -1, and there are no classes.

    A place is one of these:

    - a folder: all images below it, sorted by their paths, which are their ids;
    - an image file, whose id is the path as given;
    - a table, as the only place: the images in the column that `data.columns` or a usual name tells, relative to the
      folder of the table;
    - a folder or URL of Kaggle's ILSVRC archive with LOC_sample_submission.csv, as the only place: the test images,
      whose ids are the values of the column ImageId.

    Symbolic links are followed, also to files outside these places.

    Raises: InputError if a place does not exist, has no image or is a data set, or an image is given twice.
    """
    if not places:
        raise InputError("no images are given; give a folder, files, a CSV file, or a directory with a test listing")
    texts = [os.fspath(files.check_path(place, "images")) for place in places]
    for text in texts:
        path = Path(text)
        is_test = is_url(text) or (path / TEST_CSV).is_file()
        if is_test or (is_csv(path) and path.is_file()):
            if len(texts) > 1:
                raise InputError(f"{text}: lists images; give it alone")
            if is_test:
                return test_listing(text)
            return read_paths(path.absolute(), DataConfig(**_table_keys(data or DataConfig())))
    images = [image for text in texts for image in _images(text, alone=len(texts) == 1)]
    # Ids are written to text files, so bytes that are not UTF-8 are replaced.
    ids = np.array([os.fsencode(name).decode(errors="replace").encode() for name, _ in images])
    if repeated := find_repeats(ids):
        raise InputError(f"{os.fsdecode(ids[repeated[0][0]])}: is given twice; give each image once")
    # Links are resolved, so the files may be anywhere on the machine, and the root of the store is `/`.
    paths = np.array([os.fsencode(path).removeprefix(b"/") for _, path in images])
    return ExampleTable(LocalFiles(Path("/")), ids, paths, np.full(len(ids), -1, np.int32))


def _images(place: str, *, alone: bool) -> Iterator[tuple[str, str]]:
    """Yield (id, real path) for each image of a folder, or for a single image file."""
    path = Path(place)
    if path.is_file():
        if alone and not is_image_name(path.name) and _is_data_set(_whole_place(place, DataConfig())):
            raise InputError(f"{place}: is a data set; give its images as files, or a CSV file with their paths")
        yield place, os.path.realpath(path)
        return
    below = sorted(_below(path.absolute(), "", ())) if path.is_dir() else []
    if not below:
        problem = f"no such file or folder{files.nearest_beside(path.absolute())}"
        raise InputError(f"{place}: {'no image below this folder' if path.is_dir() else problem}; check the path")
    yield from ((name if alone else os.path.join(place, name), image) for name, image in below)


def _below(top: Path, folder: str, above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (path, real path) for each image below a folder; `above` has the real paths of its parent folders."""
    real_path = os.path.realpath(top / folder)
    if real_path in above:
        return  # A link to a parent folder: the images of that folder are found without the link.
    for entry in visible_entries(top / folder):
        name, is_image = os.path.join(folder, entry.name), is_image_name(entry.name)
        # An image behind a link that leads nowhere is one that cannot be used. Its fault names the link.
        if is_image and entry.is_symlink() and not os.path.isdir(entry.path):
            yield name, os.path.realpath(entry.path) if os.path.exists(entry.path) else entry.path
        elif is_folder(entry):
            yield from _below(top, name, (*above, real_path))
        elif is_image:
            yield name, os.path.join(real_path, entry.name)


def labelled_and_unlabelled(train: Table, data: DataConfig) -> tuple[Table, Table | None]:
    """Return the labelled source, and the unlabelled source if `data.unlabelled` is set, after checking both.

    With `data.unlabelled="train"`, the unlabelled source has all training images, including the labelled images.

    Raises: InputError if `few_labels` rejects the labelled data, or the unlabelled images cannot be opened or used.
    """
    unlabelled = None
    if data.unlabelled is not None:
        with about(Key("data.unlabelled")):
            images = train if data.unlabelled == TRAIN else open_images(data.unlabelled, data)
            if images is not train and data.verify == "manifest":
                _log.warning("data.verify=manifest: the images of data.unlabelled are compared with no manifest")
            unlabelled = images.without_labels()
            unlabelled.check(data)
    if data.labels_per_class is not None:
        train = few_labels(train, data.labels_per_class, data.labels_seed)
        train.check(data)
    return train, unlabelled


def few_labels(table: Table, per_class: int, seed: int = 0) -> Table:
    """Return `per_class` examples of each class, in the order of the rows.

    The choice in a class depends only on the seed, the id of the class and its number of examples. The examples of a
    smaller `per_class` are a subset of those of a larger `per_class`. Examples without a label are omitted.

    Raises: InputError if a class has fewer than `per_class` examples, or images have several labels.
    """
    labels = labels_of(table)
    check_one_label(labels, Key("data.labels_per_class"))
    counts = labels.counts
    if (least := int(counts.min())) < per_class:
        name = show(labels.ids[int(counts.argmin())])
        fault = f": there {'is' if least == 1 else 'are'} {counted(least, 'example')} of class {name}"
        advice = f"give at most {least}" if least else ("leave it out, by ", Key("data.classes"))
        raise InputError(Key("data.labels_per_class", per_class), fault, advice=advice)
    by_class = np.argsort(labels.values, kind="stable")[-counts.sum() :]
    of_ids = zip(labels.ids, np.split(by_class, np.cumsum(counts)[:-1]), strict=True)
    chosen = [rows[permutation(len(rows), seed, digest64(class_id.encode()))[:per_class]] for class_id, rows in of_ids]
    return table.rows(np.sort(np.concatenate(chosen)))


def chosen_images(source: Source, data: DataConfig, rows: np.ndarray) -> np.ndarray:
    """Return the evaluation images, [n, H, W, C], of int[n] rows, n >= 1. Raises: see `Source.eval_batches`."""
    return np.asarray(next(iter(source.eval_batches(_in_one_batch(source, rows), data))).image)


def sample_images(source: Source, data: DataConfig, count: int) -> np.ndarray:
    """Return at most `count` training images, [n, H, W, C], without random crops, in proportion to the classes.

    Raises: InputError if an image cannot be used.
    """
    order, whole = _in_one_batch(source, labels_of(source).share(count)), dataclasses.replace(data, crop="whole")
    return next(iter(source.train_batches(order, whole, range(1), substitutes=source.substitutes(whole)))).image


def _in_one_batch(source: Source, rows: np.ndarray) -> ChosenOrder:
    return ChosenOrder(len(source), len(rows), chosen=tuple(rows.tolist()))
