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


def read_tars(place: Place, split: Split, shards: dict[Split, list[str]]) -> ExampleTable:
    """Read a split; see `Format.open`.

    These are rejected: a shard that is missing, cut short or damaged; a sample without a label, without an image
    or with two; a key that repeats in its shard; and a label that is none of the classes.
    """
    assert place.shards is not None
    folder, refuse = place.shards[0], place.refuse
    samples = load_or_build_samples(folder, shards[split], refuse)
    every: dict[Split, dict[str, Samples]] = {split: samples}
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
        classes = find_classes(None, lambda one: cells.get(one, []), folder.name(), refuse)
    paths = {path: os.fsencode(path) for path in samples}
    return ExampleTable(
        TarFiles(folder, {paths[path]: part for path, part in samples.items()}),
        np.concatenate([np.strings.add(paths[path] + b"/", part.key) for path, part in samples.items()]),
        np.repeat(np.array([*paths.values()]), [len(part.key) for part in samples.values()]),
        np.concatenate([class_indices(one, classes, refuse) for one in cells[split]]),
        classes.names,
        offset=np.concatenate([part.offset for part in samples.values()]),
        made_of="record",
    )


def _cells(folder: Folder, path: str, samples: Samples) -> LabelCells:
    texts = [text.decode() for text in samples.label.tolist()]
    labels = [*map(int, texts)] if all(map(_NUMBER.fullmatch, texts)) else texts
    keys = samples.key.tolist()
    return LabelCells(labels, lambda row: f"{folder.name(path)}, sample {keys[row].decode()}")


def _names_in_file(folder: Folder) -> tuple[str, ...]:
    """Return the names in a file of names, in the order of the labels; none if there is no such file."""
    for name in _NAMES:
        where = folder.name(name)
        try:
            with folder.open(name) as file:
                content = file.read()
        except (FileNotFoundError, IsADirectoryError):
            continue
        except InputError:
            # Some stores answer 403 for a missing object, if its reader may not list the objects.
            if folder.can_list:
                raise
            continue
        with as_input_errors(where):
            text = content.decode("utf-8-sig")
            names = _names_in_json(text) if name.endswith(".json") else text.rstrip().splitlines()
            names = [str(one).strip() for one in names]
            if not all(names):
                raise InputError("a name is empty; write one name for each class, in the order of the labels")
        check_names(names, lambda place, where=where: f"{where}, name {place + 1}")
        return tuple(names)
    return ()


def _names_in_json(text: str) -> list[str]:
    """Return the names of a list, or of an object from numbers to names. Raises: ValueError or InputError."""
    content = files.parse_json(text)
    if isinstance(content, dict) and {*content} == {*map(str, range(len(content)))}:
        content = [content[str(number)] for number in range(len(content))]
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise InputError('no list of names; write ["cat", "dog"], or {"0": "cat", "1": "dog"}')
    return content


_DESCRIPTION = "a directory, a URL or a pattern of .tar files (WebDataset)"
FORMATS.add("webdataset")(ShardFormat(_DESCRIPTION, ".tar", read_tars))
