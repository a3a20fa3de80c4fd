"""Reads data sets of the Hugging Face Hub and of its library `datasets`.

    hf:OWNER/NAME[:CONFIG][@REVISION]    a data set of the hub, which is downloaded once, to the cache of the library
    hf:FOLDER                            a folder that `load_dataset` accepts, or that `save_to_disk` wrote
    FOLDER                               a folder that `save_to_disk` wrote

Images are read by row from files that are mapped into memory. `data.train` and `data.val` name other splits.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.data.formats.listing as listing
import jaxddp.data.storage.tables as tables
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.core.files import expanded
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.splits import required_split, split_name
from jaxddp.data.source import Split
from jaxddp.data.table import ExampleTable

_PREFIX = "hf:"
_ADDRESS = re.compile(r"(?P<name>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<revision>[^:@]+))?")


class HubSets:
    """The format of addresses with the prefix hf:, and of folders that `save_to_disk` wrote."""

    description = f"{_PREFIX}OWNER/NAME (a data set of the Hugging Face Hub), or a directory of its save_to_disk"
    keys = ("columns",)

    def match(self, place: Place) -> Match:
        return Match.NAMED if place.address.startswith(_PREFIX) or tables.is_saved(place.path) else Match.NONE

    def divided(self, place: Place) -> bool:
        return split_name(place.address, _open_splits(place), "val", place.data) is not None

    def open(self, place: Place, split: Split) -> ExampleTable:
        """Open a split; see `Format.open`.

        Rows whose label is missing or names no class are rejected. The path of a table holds the name of the split and
        a digest of the lengths of its images, so the fingerprint is that of the content on every machine.
        """
        splits = _open_splits(place)
        name = required_split(place.address, splits, split, place.data)
        where, dataset = f"{place.address}, {name}", splits[name]
        columns, cells = _read_labels(where, dataset, place)

        def cells_of(one: Split) -> list[tables.LabelCells]:
            if one == split:
                return [cells]
            other = split_name(place.address, splits, one, place.data)
            return [_read_labels(f"{place.address}, {other}", splits[other], place)[1]] if other else []

        classes = tables.find_classes(columns.names, cells_of, place.address, place.refuse)
        labels = tables.class_indices(cells, classes, place.refuse)
        store, digest = _store(where, dataset, columns.image)
        ids = np.strings.add(f"{name}__".encode(), np.arange(len(labels)).astype("S"))
        path = np.full(len(labels), f"{name}@{digest}".encode())
        table = ExampleTable(store, ids, path, labels, classes.names, offset=np.arange(len(labels)))
        return table.without(np.flatnonzero(labels == tables.REFUSED)).select(place.data.classes)


def _open_splits(place: Place) -> Mapping[str, Any]:
    name = place.address.removeprefix(_PREFIX)
    folder = expanded(name).absolute()
    if tables.is_saved(folder):
        return tables.open_saved(folder)
    if folder.is_dir():
        return tables.open_prepared(str(folder), None, None)
    parts = _ADDRESS.fullmatch(name)
    if parts is None:
        raise InputError(f"{place.address}: not an address; write hf:OWNER/NAME[:CONFIG][@REVISION], or hf:FOLDER")
    return tables.open_prepared(parts["name"], parts["config"], parts["revision"])


def _read_labels(where: str, dataset: Any, place: Place) -> tuple[listing.Columns, tables.LabelCells]:
    """Return the columns of a split, and its labels."""
    kinds, features = tables.import_datasets(where), dataset.features
    if not len(dataset):
        raise InputError(f"{where}: holds no row; choose another split")
    images = [name for name, kind in features.items() if isinstance(kind, kinds.Image)]
    labels = {name: kind for name, kind in features.items() if isinstance(kind, kinds.ClassLabel)}
    classes = {name: tuple(map(str, kind.names)) for name, kind in labels.items()}
    chosen = listing.choose_columns(listing.Listing(where, [*features], images, classes), place.data)
    if chosen.image not in images:
        raise InputError(f"{where}: no column of images, found {', '.join(features)}; choose a set with an Image")
    label = chosen.labels[0]
    values = dataset.select_columns([label]).with_format("arrow")[:].column(0)
    return chosen, tables.label_cells(values.combine_chunks(), where, label, place.refuse)


def _store(where: str, dataset: Any, image: str) -> tuple[tables.ArrowRows, str]:
    """Return the images of a split, and a digest of their lengths."""
    kinds = tables.import_datasets(where)
    rows = dataset.select_columns([image]).cast_column(image, kinds.Image(decode=False)).with_format("arrow")
    lengths = tables.image_lengths(rows)
    files = [Path(os.path.abspath(file["filename"])) for file in dataset.cache_files] if lengths.min() >= 0 else []
    return tables.ArrowRows(where, rows, files), hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]


FORMATS.add("hugging_face")(HubSets())
