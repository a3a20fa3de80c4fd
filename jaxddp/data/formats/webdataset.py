"""Reads tar files of WebDataset, whose samples are files that share a key: `000017.jpg` and `000017.cls`.

`jaxddp.data.formats.splits` finds the files, and `jaxddp.data.storage.tar` their samples. The first run
indexes the position of every image, so images are read in any order, and a resumed run continues exactly. An id is the
path of the shard and the key. Labels are numbers, whose names are in `classes.txt` or `classes.json` beside the
shards; or names, and then the classes are the sorted labels of the training split. One training label
that is a name makes all labels names, also those that consist of digits.
"""

import os
import re

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.data.faults import pass_faults_to, raise_fault
from jaxddp.data.format import Place
from jaxddp.data.formats.array_files import as_input_errors, check_names
from jaxddp.data.formats.splits import ShardFormat
from jaxddp.data.source import Split
from jaxddp.data.storage.root import Folder
from jaxddp.data.storage.tables import Classes, LabelCells, class_indices, find_classes
from jaxddp.data.storage.tar import Samples, TarFiles, load_or_build_samples
from jaxddp.data.table import ExampleTable

_NAMES = ("classes.txt", "classnames.txt", "classes.json")
_NUMBER = re.compile(r"-?[0-9]{1,9}")


def read_tars(place: Place, folder: Folder, split: Split, shards: dict[Split, list[str]]) -> ExampleTable:
    """Read a split; see `Format.open`.

    These are rejected: a shard that is missing, cut short or damaged; a sample without a label, without an image
    or with two; a key that repeats in its shard; and a label that is none of the classes.
    """
    every = {split: load_or_build_samples(folder, shards[split], place.refuse)}
    for other in shards.keys() - {split}:
        # The faults of a split are reported when it is opened. Without the training split, there may be no classes.
        with pass_faults_to(raise_fault if other == "train" else lambda fault: None):
            every[other] = load_or_build_samples(folder, shards[other], lambda fault: None)
    cells = {one: [_cells(folder, path, part) for path, part in parts.items()] for one, parts in every.items()}
    words = {label for of_split in cells.values() for one in of_split for label in one.labels}
    if names := _names_in_file(folder):
        # A mistyped label does not turn the other labels into names.
        classes = Classes(names, numbered=words.isdisjoint(names))
    else:
        classes = find_classes((), lambda one: cells.get(one, []), folder.name(), place.refuse)
    parts = {os.fsencode(path): part for path, part in every[split].items()}
    ids = np.concatenate([np.strings.add(path + b"/", part.key) for path, part in parts.items()])
    paths = np.repeat(np.array([*parts]), [len(part.key) for part in parts.values()])
    labels = np.concatenate([class_indices(one, classes, place.refuse) for one in cells[split]])
    offset = np.concatenate([part.offset for part in parts.values()])
    return ExampleTable(TarFiles(folder, parts), ids, paths, labels, classes.names, offset=offset)


def _cells(folder: Folder, path: str, samples: Samples) -> LabelCells:
    texts = [text.decode() for text in samples.label.tolist()]
    labels = [*map(int, texts)] if all(map(_NUMBER.fullmatch, texts)) else texts
    keys, where = samples.key.tolist(), folder.name(path)
    return LabelCells(labels, lambda row: f"{where}, sample {keys[row].decode()}")


def _names_in_file(folder: Folder) -> tuple[str, ...]:
    """Return the names in a file of names, in the order of the labels; none if there is no such file."""
    for name in _NAMES:
        where = folder.name(name)
        try:
            content = folder.read_text(name)
        except (FileNotFoundError, IsADirectoryError, InputError) as error:
            # Some stores answer 403 for a missing object, if its reader may not list the objects.
            if isinstance(error, InputError) and folder.can_list:
                raise
            continue
        with as_input_errors(where):
            text = content.decode("utf-8-sig")
            names = files.parse_json(text) if name.endswith(".json") else text.rstrip().splitlines()
            if isinstance(names, dict) and {*names} == {*map(str, range(len(names)))}:
                names = [names[str(number)] for number in range(len(names))]
            if not isinstance(names, list) or not all(isinstance(one, str) and one.strip() for one in names):
                raise InputError('no list of names; write ["cat", "dog"], {"0": "cat", "1": "dog"}, or a name a line')
        names = tuple(map(str.strip, names))
        check_names(names, lambda place, where=where: f"{where}, name {place + 1}")
        return names
    return ()


FORMATS.add("webdataset")(ShardFormat("a directory, a URL or a pattern of .tar files (WebDataset)", ".tar", read_tars))
