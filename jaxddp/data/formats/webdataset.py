"""Reads tar files of WebDataset, whose samples are files that share a key: `000017.jpg` and `000017.cls`.

`jaxddp.data.formats.splits` finds the files, and `jaxddp.data.storage.tar` their samples. The first run
indexes the position of every image, so images are read in any order, and a resumed run continues exactly. An id is the
path of the shard and the key. Labels are numbers, whose names are in `classes.txt` or `classes.json` beside the
shards; or names, and then the classes are the sorted labels of the training split. One label that is a name makes all
labels names, also those that consist of digits.
"""

import os
import re
from contextlib import suppress

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, about
from jaxddp.core.wording import counted, nearest, show
from jaxddp.data.faults import Refuse, check_distinct
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.array_files import as_input_errors, check_names, numbered_names
from jaxddp.data.formats.splits import find_shards, has_shards
from jaxddp.data.formats.table_columns import Classes
from jaxddp.data.source import Split
from jaxddp.data.storage.shards import ShardFile, ShardFolder, with_cache
from jaxddp.data.storage.tar import Samples, TarFiles, load_or_build_samples
from jaxddp.data.table import ExampleTable

_SUFFIX = ".tar"
_NAMES = ("classes.txt", "classnames.txt", "classes.json")
_NUMBER = re.compile(rb"-?[0-9]{1,9}")
_REFUSED = -2
"""The label of a rejected sample."""


class TarShards:
    """The format of tar files."""

    description = "a directory, a URL or a pattern of .tar files (WebDataset)"

    def match(self, place: Place) -> Match:
        if place.shards is None:
            return Match.NONE
        folder, pattern = place.shards
        if any((name or "").endswith(_SUFFIX) for name in (pattern, place.data.train, place.data.val)):
            return Match.NAMED
        if pattern or not folder.can_list:
            return Match.NONE
        if folder.root is not None:
            return Match.WHOLE if has_shards(place, _SUFFIX) else Match.NONE
        # Permission to read an object does not include permission to list.
        with suppress(InputError):
            return Match.NAMED if has_shards(place, _SUFFIX) else Match.NONE
        return Match.NONE

    def divided(self, place: Place) -> bool:
        return "val" in find_shards(place, _SUFFIX)

    def open(self, place: Place, split: Split) -> ExampleTable:
        """Open a split; see `Format.open`.

        These are rejected: a shard that is missing, cut short or damaged; a sample without a label, without an image
        or with two; a key that repeats in its shard; and a label that is none of the classes.
        """
        assert place.shards is not None
        folder, shards = place.shards[0], find_shards(place, _SUFFIX)
        if split not in shards:
            raise InputError(f"{folder.name()}: no shards of its {split} split; call them {split}-*.tar")
        samples = load_or_build_samples(folder, shards[split], place.refuse)
        every: dict[Split, dict[str, Samples]] = {split: samples}
        for other in shards.keys() - {split}:
            # The faults of a split are reported when it is opened. Without the training split, there may be no classes.
            with suppress(*[InputError] * (other == "val")):
                every[other] = load_or_build_samples(folder, shards[other], lambda fault: None)
        classes, refuse = _classes(folder, every, place.refuse), place.refuse
        labels = [_class_indices(ShardFile(folder, path), part, classes, refuse) for path, part in samples.items()]
        paths = {path: os.fsencode(path) for path in samples}
        table = ExampleTable(
            with_cache(
                TarFiles(folder, {paths[path]: part for path, part in samples.items()}), folder, place.data.local_cache
            ),
            np.concatenate([np.strings.add(paths[path] + b"/", part.key) for path, part in samples.items()]),
            np.repeat(np.array([*paths.values()]), [len(part.key) for part in samples.values()]),
            np.concatenate(labels),
            classes.names,
            offset=np.concatenate([part.offset for part in samples.values()]),
            made_of="record",
        )
        return table.without(np.flatnonzero(table.labels == _REFUSED).tolist()).select(place.data.classes)


def _classes(folder: ShardFolder, every: dict[Split, dict[str, Samples]], refuse: Refuse) -> Classes:
    """Return the classes of a file beside the shards, or those of the labels of all splits."""
    labels = [np.unique(part.label) for parts in every.values() for part in parts.values()]
    words = {label.decode() for part in labels for label in part.tolist() if not _NUMBER.fullmatch(label)}
    if names := _names_in_file(folder):
        return Classes(names, numbered=words.isdisjoint(names))
    if not words:
        with about(folder.name()):
            return Classes(numbered_names(*(label.astype(np.int64) for label in labels)), numbered=True)
    first: dict[str, str] = {}
    for path, part in every.get("train", {}).items():
        for key, label in zip(part.key.tolist(), part.label.tolist(), strict=True):
            first.setdefault(label.decode(), f"{folder.name(path)}, sample {key.decode()}")
    check_distinct(first, first.__getitem__, refuse)
    return Classes(tuple(sorted(first)), numbered=False)


def _names_in_file(folder: ShardFolder) -> tuple[str, ...]:
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


def _class_indices(file: ShardFile, samples: Samples, classes: Classes, refuse: Refuse) -> np.ndarray:
    """Return class indices, int32[N]; -1 if the class is unknown, which the label -1 says."""
    names = classes.names
    distinct, inverse = np.unique(samples.label, return_inverse=True)
    if classes.numbered:
        index = {label: int(label) for label in distinct.tolist() if _NUMBER.fullmatch(label)}
    else:
        index = {b"-1": -1} | {name.encode(): label for label, name in enumerate(names)}
    labels = np.array([index.get(label, len(names)) for label in distinct.tolist()], np.int64)[inverse]
    wrong = (labels < -1) | (labels >= len(names))
    for row in np.flatnonzero(wrong).tolist():
        label = samples.label[row].decode()
        refuse(
            f"{file}, sample {samples.key[row].decode()}: label {show(label)} is none of the "
            f"{counted(len(names), 'class')}{nearest(label, names)}; correct it"
        )
    return np.where(wrong, _REFUSED, labels).astype(np.int32)


FORMATS.add("webdataset")(TarShards())
