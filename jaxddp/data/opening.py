"""Open the training and validation data of a config, with the format that best matches `data.path` or `data.name`.

The modules of `jaxddp/data/formats/` register the formats in `FORMATS`; see `jaxddp.data.format` to add a format.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, Option
from jaxddp.core.phases import doing
from jaxddp.data.faults import Refuse, pass_faults_to, raise_fault
from jaxddp.data.format import Format, Match, Place
from jaxddp.data.formats.csv_listing import has_labels, is_csv
from jaxddp.data.inputs import open_inputs
from jaxddp.data.selection.held_out import held_out
from jaxddp.data.soundness.image_manifest import ImageManifest, compare_with_manifest, find_manifest
from jaxddp.data.source import SourceTable, Split
from jaxddp.data.storage import catalog
from jaxddp.data.storage.data_root import convert_os_errors, nearest_beside
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS


def open_tables(data: DataConfig, val_limit: int | None = None) -> tuple[SourceTable, SourceTable]:
    """Open and check the training and validation data of a config; `val_limit` limits the validation examples.

    Raises: see `open_splits` and `Table.check`.
    """
    train, val = open_unchecked(data, val_limit)
    with doing("looking for the images"):
        for source in (train, val):
            source.check(data)
    return train, val


def open_unchecked(data: DataConfig, val_limit: int | None = None) -> tuple[SourceTable, SourceTable]:
    """Open the data like `open_tables`, without checking that the images exist. Raises: see `open_splits`."""
    train, val = open_full_splits(data).values()
    if data.limit is not None:
        train = train.take(data.limit)
    if val_limit is not None:
        val = val.take(val_limit)
    return train, val


@convert_os_errors()
def open_full_splits(data: DataConfig) -> dict[str, SourceTable]:
    """Open both splits without limits. Labels are multi-hot if an image of either split has several labels.

    With `data.verify=manifest`, the images are compared with a manifest; see `compare_with_manifest`.

    Raises: see `open_splits` and `compare_with_manifest`.
    """
    splits = open_splits(data)
    if data.verify == "manifest":
        file = find_manifest(_place(data).address, data.manifest)
        with doing(f"reading {file.name}"):
            splits = compare_with_manifest(splits, ImageManifest.read(file), data)
    return _with_several_labels(splits)


def _with_several_labels(splits: dict[str, SourceTable]) -> dict[str, SourceTable]:
    """Return the splits; their labels are multi-hot if an example of either split has several classes."""
    listings = [table for table in splits.values() if isinstance(table, ExampleTable)]
    if len(listings) < len(splits) or all(table.label_sets is None for table in listings):
        return splits
    return {split: table.with_several_labels() for split, table in zip(splits, listings, strict=True)}


@convert_os_errors()
@doing("reading the data set", noun="row")
def open_validation_split(data: DataConfig) -> SourceTable:
    """Open the validation split without its limit, or all images if there is none. The training split may be missing.

    Raises: see `open_full_splits`.
    """
    place = _place(data)
    if data.verify == "manifest" or data.val_share is not None:
        return open_full_splits(data)["val"]
    split = "val" if _format_of(place).divided(place) else "train"
    return _with_several_labels({split: _format_of(place).open(place, split)})[split]


@convert_os_errors()
@doing("reading the data set", noun="row")
def open_splits(data: DataConfig, refuse: Refuse = raise_fault) -> dict[str, SourceTable]:
    """Open "train" and "val" with the selected classes, without checking images.

    Args:
        refuse: a callback with the message about an unusable row, file or split. By default it raises an error. If it
            returns, the row, file or split is skipped.

    Raises:
        InputError: `data.path` and `data.name` are both set or both unset; a validation split and `data.val_share` both
            exist or are both missing; or the data have a fault.
    """
    place = dataclasses.replace(_place(data), refuse=refuse)
    data_format, where = _format_of(place), place.local or place.address
    if data_format.divided(place):
        if data.val_share is not None:
            raise InputError(
                Key("data.val_share", data.val_share, f"{data.val_share:g}"),
                f": {where} has its own validation split",
                advice=("leave ", Key("data.val_share"), " out, which is for data without this split"),
            )
        return _open_each_split(data_format, place, str(where))
    if data.val_share is None:
        raise InputError(
            f"{where}: has no validation split",
            advice=("give ", Key("data.val_share"), ", such as 0.1 to hold out a tenth of each class"),
        )
    return {**held_out(cast(ExampleTable, data_format.open(place, "train")), data.val_share, str(where))}


def _open_each_split(data_format: Format, place: Place, where: str) -> dict[str, SourceTable]:
    """Open each split that can be opened. Raises: InputError if no split can be opened, or if `refuse` raises it."""
    opened: dict[str, SourceTable] = {}
    splits: tuple[Split, Split] = ("train", "val")
    for split in splits:
        # After a fault of one split, the other is still opened. But a file that the config names must be readable.
        with pass_faults_to(raise_fault if getattr(place.data, split) else place.refuse):
            opened[split] = data_format.open(place, split)
    if not opened:
        raise InputError(f"{where}: no split can be read; correct the faults that are listed above")
    return opened


@convert_os_errors()
@doing("reading the data set", noun="row")
def open_images(path: str, data: DataConfig) -> SourceTable:
    """Open the images of all classes at another path: the training split of a data set, or unlabelled images.

    Images are not checked. Raises: InputError if there are no images, or the data have a fault.
    """
    place = _whole_place(path, data)
    # A CSV file may have no labels, so only its column of images is read.
    is_data_set = _is_data_set(place) and not is_csv(Path(path))
    return _format_of(place).open(place, "train") if is_data_set else open_inputs([path])


@convert_os_errors()
def open_one_split(paths: Sequence[str], data: DataConfig, split: Split | None = None) -> SourceTable:
    """Open the images of a split of a data set, with labels, or unlabelled images; see `open_inputs`.

    If the path is that of the config, all settings of the config apply, such as `val_share`, except its limits.
    Otherwise the data set has all of its classes.

    Args:
        paths: the path of a data set, or paths of unlabelled images.
        split: the split; by default, the validation split, or all images if there is none.

    Raises:
        InputError: there are no images or no such split, or the data have a fault.
    """
    if not paths:
        return open_inputs(paths)
    (path, *others), is_own = paths, False
    if data.path is not None and not others:
        is_own = os.path.realpath(files.expanded(path)) == os.path.realpath(files.expanded(data.path))
    place = _place(data) if is_own else _whole_place(path, dataclasses.replace(data, val_share=None))
    is_labelled = not is_csv(Path(path)) or has_labels(files.expanded(path).absolute())
    if others or not is_labelled or not _has_classes(place):
        if split is not None:
            raise InputError(f"--split {split}: {path} is no data set with splits; leave it out")
        return open_inputs(paths)
    if _format_of(place).divided(place) or place.data.val_share is not None:
        return cast(SourceTable, open_full_splits(place.data)[split or "val"])
    if split == "val":
        raise InputError(f"--split val: {path} has no validation split; leave it out for all images")
    with doing("reading the data set"):
        return _with_several_labels({"train": _format_of(place).open(place, "train")})["train"]


def _whole_place(path: str, data: DataConfig) -> Place:
    """Return the place of a data set with all of its classes."""
    changes = {"path": path, "name": None, "train": None, "val": None, "classes": None}
    return Place(path, dataclasses.replace(data, **changes))


def _is_data_set(place: Place) -> bool:
    return any(FORMATS.get(name).match(place) >= Match.WHOLE for name in FORMATS.names())


def _has_classes(place: Place) -> bool:
    """Return whether a place is a data set, or a folder of class folders, which matches no other format."""
    matches = [name for name in FORMATS.names() if FORMATS.get(name).match(place) > Match.NONE]
    return _is_data_set(place) or matches == ["folders"]


def _place(data: DataConfig) -> Place:
    for key in data.keys_of_process:
        value = getattr(data, key)
        raise InputError(
            Key(f"data.{key}", value),
            " names data of each process, and one process reads them here",
            advice=f"give the data of one process, such as {data.of_process(0).path}",
        )
    if (data.path is None) == (data.name is None):
        raise InputError(
            *("data: give one of ", Key("data.path"), " (a folder, a URL or tfds:NAME) and ", Key("data.name")),
            *(" (in datasets.toml); now ", Key("data.path", data.path), ", ", Key("data.name", data.name)),
        )
    if data.name is None:
        return Place(data.path or "", data)
    entry = catalog.resolve(data.name)
    completed = {key: getattr(data, key) or getattr(entry, key) for key in ("train", "val", "classes")}
    return Place(entry.path, dataclasses.replace(data, **completed))


def _format_of(place: Place) -> Format:
    matches = {name: FORMATS.get(name).match(place) for name in FORMATS.names()}
    best = max(matches.values())
    if best is Match.NONE:
        if place.local is not None and not place.local.exists():
            raise InputError(
                f"{place.local}: no such directory or file{nearest_beside(place.local)}",
                advice=("check ", Option("data.path")),
            )
        descriptions = "; ".join(FORMATS.get(name).description for name in matches)
        raise InputError(
            f"{place.local or place.address}: holds no data set of a known format; give one of: {descriptions}"
        )
    names = [name for name, match in matches.items() if match is best]
    if len(names) > 1:
        raise InputError(
            f"{place.local or place.address}: holds data sets of {len(names)} formats, {' and '.join(names)}; give a "
            "directory with one of them, or a file"
        )
    return FORMATS.get(names[0])
