"""Reads ImageNet's original archive: the development kit has the classes of the validation images.

    ROOT/train/<synset>/*.JPEG
    ROOT/val/*.JPEG                                                 or ILSVRC2012_img_val/
    ROOT/ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt      one number a line
    ROOT/ILSVRC2012_devkit_t12/data/meta.mat                        the synset of each number

In place of the kit, a text file whose name has `val` may list each image with its class or the index of its class:
ROOT/val.txt, or val/val_annotations.txt beside val/images/ (Tiny ImageNet).
The kit may also be in one of two parent folders. The format "ilsvrc" uses this module.
"""

import io
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jaxddp.core.files as files
import jaxddp.data.formats.folders as folders
from jaxddp.core.errors import InputError, counted, first_line, show
from jaxddp.data.faults import Refuse
from jaxddp.data.formats.splits import find_split, rank
from jaxddp.data.source import Split
from jaxddp.data.storage.root import HEAD, FolderFile
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_ADVICE = "unpack the development kit again"


class Kit(NamedTuple):
    """A directory with validation images, and the development kit with their classes."""

    root: Path
    images: str
    """The folder of the validation images, which has no class folders."""
    truth: Path
    """The file with the number of the class of each validation image, in the order of the names of the images."""


def find_kit(root: Path) -> Kit | None:
    """Return the development kit for the validation images of a directory; None if there are no such files.

    Raises: InputError; see `find_layout`.
    """
    # In a tree of class folders, the layout would take a listing of each.
    if not root.is_dir() or not any(rank(name, "val") for name in folders.visible_folders(root)):
        return None
    layout = folders.find_layout(root)
    folder = find_split("val", [name for name in layout.unlabelled if "test" not in name.lower()], root)
    if folder is None or "val" in layout.splits or any(root.glob("LOC_*_solution.csv")):
        return None
    images = folder if folders.image_names(root / folder) else f"{folder}/images"
    found = (place.glob(way + _TRUTH) for place in (root, *root.parents[:2]) for way in ("", "*/", "*/data/"))
    lists = (sorted(place.glob("*val*.txt")) for place in (root, root / folder))
    ways = itertools.chain(*found, (file for files_of in lists for file in files_of if _lists(file, root / images)))
    return next((Kit(root, images, file) for file in ways), None)


def _lists(file: Path, folder: Path) -> bool:
    """Return whether the first line of a file is the name of an image in a folder, and a word."""
    name, *label = FolderFile(LocalFiles(file.parent), file.name).text(HEAD).partition("\n")[0].split()[:2] or [""]
    return bool(label) and folders.is_image_name(name) and (folder / os.path.basename(name)).is_file()


def read_kit(kit: Kit, split: Split, refuse: Refuse) -> ExampleTable:
    """Read a split of the original archive. Validation images of classes that the training split lacks are left out.

    Without a training split, the classes are those of the kit, sorted.

    Raises: InputError if a file is missing or damaged, or there is another number of images than of labels.
    """
    layout = folders.find_layout(kit.root)
    if split == "train":
        table = folders.read_folders(kit.root, split, refuse)
        return replace(table, reading=table.reading.partition(";")[0])
    text = files.content_of(kit.truth, _ADVICE).decode(errors="replace")
    images = folders.image_names(kit.root / kit.images)
    if kit.truth.name == _TRUTH:
        numbers, synset_of = text.split(), _synsets(kit.truth.with_name("meta.mat"))
    else:
        names, rows = folders.class_names(layout, "train", refuse), [line.split() for line in text.splitlines()]
        listed = {os.path.basename(row[0]): row[1] for row in rows if len(row) > 1}
        numbers = [listed[image] for image in images if image in listed]
        synset_of = {name: name for name in names}
        # Names may be numbers, too.
        if not {*numbers} <= {*names}:
            synset_of |= {str(number): name for number, name in enumerate(names)}
    if len(numbers) != len(images):
        fault = f"{counted(len(numbers), 'label')}, but {counted(len(images), 'image')} in {kit.root / kit.images}"
        raise InputError(f"{kit.truth}: {fault}; unpack all validation images there")
    if unknown := sorted({*numbers} - {*synset_of}):
        raise InputError(f"{kit.truth}: {show(unknown[0])} is the number of no class; correct it, or {_ADVICE}")
    names = folders.class_names(layout, "train", refuse) if "train" in layout.splits else sorted(synset_of.values())
    known = {name: label for label, name in enumerate(names)}
    labels = np.array([known.get(synset_of[number], -1) for number in numbers], np.int32)
    ids = np.array([os.fsencode(f"{kit.images}/{os.path.splitext(image)[0]}") for image in images])
    paths = np.array([os.fsencode(f"{kit.images}/{image}") for image in images])
    count = counted(len(images), "image")
    if (labels < 0).any():
        count = f"{(labels >= 0).sum():,} of {count}"
    reading = f"{count} in {kit.images}/ by {kit.truth.name}"
    table = ExampleTable(LocalFiles(kit.root, follows_links=True), ids, paths, labels, tuple(names), reading=reading)
    return table.without(np.flatnonzero(labels < 0))


def _synsets(file: Path) -> Mapping[str, str]:
    """Return the synset of the number of each class."""
    # SciPy takes a while to import.
    import scipy.io

    content = io.BytesIO(files.content_of(file, _ADVICE))
    try:
        rows = scipy.io.loadmat(content, squeeze_me=True)["synsets"]
        # Synsets above the classes have children.
        return {str(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows if row["num_children"] == 0}
    # A damaged file can cause any error.
    except Exception as error:
        raise InputError(f"{file}: damaged ({first_line(error)}); {_ADVICE}") from None
