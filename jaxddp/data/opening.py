"""`data.path` or `data.name` becomes a training and a validation source, read by the format that matches what is there.

The formats are `FORMATS`, the modules of `jaxddp/data/formats/`; see `jaxddp.data.format` for how to add one.
"""

import dataclasses
from typing import cast

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Option
from jaxddp.core.phases import doing
from jaxddp.data.faults import Refuse, at_once, told_to
from jaxddp.data.format import Format, Match, Place
from jaxddp.data.inputs import open_inputs
from jaxddp.data.selection.held_out import held_out
from jaxddp.data.soundness.image_manifest import ImageManifest, find_manifest, held_to_manifest
from jaxddp.data.source import SourceTable, Split
from jaxddp.data.storage import catalog
from jaxddp.data.storage.home import nearest_beside, permitted
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS


def open_tables(data: DataConfig, val_limit: int | None = None) -> tuple[SourceTable, SourceTable]:
    """The training and the validation source of a config, checked; of the latter no more than `val_limit` examples.

    Raises: as `open_splits` and `Table.check`.
    """
    train, val = open_unchecked(data, val_limit)
    with doing("looking for the images"):
        for source in (train, val):
            source.check(data)
    return train, val


def open_unchecked(data: DataConfig, val_limit: int | None = None) -> tuple[SourceTable, SourceTable]:
    """The same, but no image is looked for. Raises: as `open_splits`."""
    train, val = open_held(data).values()
    if data.limit is not None:
        train = train.take(data.limit)
    if val_limit is not None:
        val = val.take(val_limit)
    return train, val


@permitted()
def open_held(data: DataConfig) -> dict[str, SourceTable]:
    """As `open_splits`: with multi-hot labels where an image has several, and held to the manifest that `data.verify`
    asks for. Raises: InputError; as `held_to_manifest`, too."""
    splits = open_splits(data)
    if data.verify == "manifest":
        file = find_manifest(_place(data).address, data.manifest)
        with doing(f"reading {file.name}"):
            splits = held_to_manifest(splits, ImageManifest.read(file), data)
    return _with_several_labels(splits)


def _with_several_labels(splits: dict[str, SourceTable]) -> dict[str, SourceTable]:
    """With multi-hot labels in every split where any example of any of them is of several classes."""
    listings = [table for table in splits.values() if isinstance(table, ExampleTable)]
    if len(listings) < len(splits) or all(table.label_sets is None for table in listings):
        return splits
    return {split: table.with_several_labels() for split, table in zip(splits, listings, strict=True)}


@permitted()
@doing("reading the data set")
def open_splits(data: DataConfig, refuse: Refuse = at_once) -> dict[str, SourceTable]:
    """The sources of "train" and "val", with the selected classes; images are not checked.

    A row, a file or a split that cannot be used is an error, unless `refuse` takes it: then the others are read
    without it.

    Raises `InputError` for neither a path nor a name, both, no validation split and no `data.val_share` that makes one,
    both of these, or whatever is wrong with the data.
    """
    place = dataclasses.replace(_place(data), refuse=refuse)
    known, where = _format_of(place), place.local or place.address
    if known.divided(place):
        if data.val_share is not None:
            raise InputError(
                Key("data.val_share", data.val_share, f"{data.val_share:g}"),
                f": {where} is read with a validation split of its own",
                advice=("leave ", Key("data.val_share"), " out, which is for folders, CSV and Parquet without one"),
            )
        return _each_split(known, place, str(where))
    if data.val_share is None:
        raise InputError(
            f"{where}: has no validation split",
            advice=("give ", Key("data.val_share"), ", such as 0.1 to hold out a tenth of each class"),
        )
    return {**held_out(cast(ExampleTable, known.open(place, "train")), data.val_share, str(where))}


def _each_split(known: Format, place: Place, where: str) -> dict[str, SourceTable]:
    """Those splits that can be opened. Raises: InputError; there is none, or what is wrong is not refused."""
    opened: dict[str, SourceTable] = {}
    splits: tuple[Split, Split] = ("train", "val")
    for split in splits:
        # What one split lacks as a whole hides no fault of the other; a table that the user names is none of the set's.
        with told_to(at_once if getattr(place.data, split) else place.refuse):
            opened[split] = known.open(place, split)
    if not opened:
        raise InputError(f"{where}: no split can be read; mend what is named above")
    return opened


@permitted()
@doing("reading the data set")
def open_images(path: str, data: DataConfig) -> SourceTable:
    """The images of another path, of whatever classes: those to train on of a data set, else all that lie there.

    No image is checked. Raises: InputError; there are none, or whatever is wrong with the data.
    """
    elsewhere = {"path": path, "name": None, "train": None, "val": None, "classes": None}
    place = Place(path, dataclasses.replace(data, **elsewhere))
    certain = any(FORMATS.get(name).match(place) >= Match.WHOLE for name in FORMATS.names())
    # A CSV file that lists images may list labels or not.
    return _format_of(place).open(place, "train") if certain and not path.endswith(".csv") else open_inputs([path])


def _place(data: DataConfig) -> Place:
    if (data.path is None) == (data.name is None):
        raise InputError(
            *("data: give one of ", Key("data.path"), " (a folder, a URL or tfds:NAME) and ", Key("data.name")),
            *(" (in datasets.toml); now ", Key("data.path", data.path), ", ", Key("data.name", data.name)),
        )
    if data.name is None:
        return Place(data.path or "", data)
    entry = catalog.resolve(data.name)
    told = {key: getattr(data, key) or getattr(entry, key) for key in ("train", "val", "classes")}
    return Place(entry.path, dataclasses.replace(data, **told))


def _format_of(place: Place) -> Format:
    matches = {name: FORMATS.get(name).match(place) for name in FORMATS.names()}
    best = max(matches.values())
    if best is Match.NONE:
        if place.local is not None and not place.local.exists():
            raise InputError(
                f"{place.local}: no such directory or file{nearest_beside(place.local)}",
                advice=("check ", Option("data.path")),
            )
        forms = "; ".join(FORMATS.get(name).description for name in matches)
        raise InputError(f"{place.local or place.address}: holds no data set of a known format; give one of: {forms}")
    names = [name for name, match in matches.items() if match is best]
    if len(names) > 1:
        raise InputError(
            f"{place.local or place.address}: holds data sets of {len(names)} formats, {' and '.join(names)}; give a "
            "directory with one of them"
        )
    return FORMATS.get(names[0])
