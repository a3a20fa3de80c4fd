"""Reads a tree with one folder for each class; no file lists the images.

ROOT/train/<class>/**/*.jpg     jpg, jpeg, jpe, jfif, png, webp, tif, tiff, bmp, ppm or pgm
ROOT/val/<class>/**/*.jpg       or valid/, validation/ or test/: the first of these that exists

Without a validation folder, or without both folders (ROOT/<class>/**/*.jpg), `data.val_share` divides the images.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, pass_faults_to, raise_fault
from jaxddp.data.format import LocalFormat, Match
from jaxddp.data.formats.splits import SPLITS
from jaxddp.data.source import Split
from jaxddp.data.storage.root import FolderFile
from jaxddp.data.storage.store import LocalFiles, link_out
from jaxddp.data.table import ExampleTable

_log = logging.getLogger("jaxddp.data")
_SUPPORTED = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".ppm", ".pgm"})
# Image files of these types are an error, because a run that ignored them would train on fewer images.
_UNSUPPORTED = frozenset({".gif", ".heic", ".avif"})

# A file of these names beside the class folders may hold the labels, which a run would ignore.
_LISTINGS = re.compile(r".*\.(csv|tsv|xlsx?)|(labels|annotations|train|val|metadata)\.(txt|jsonl?|parquet)")
_METADATA = re.compile(r"metadata\.(csv|jsonl|parquet)")
"""The labels of an `ImageFolder` of the library `datasets`; files of other names are usual beside train/ and val/."""
_HEAD = 1 << 16
"""The number of characters of a text file in which names of images are looked for."""

# Listing folders mostly waits for the disk or for a server.
_LISTING_THREADS = 16


def holds_folders(root: Path) -> bool | Match:
    """Return whether a directory is a tree of class folders: it has a folder `train` that contains folders.

    A directory with folders of images, but without the folder of a split, is a partial match, because its images may
    belong to another format.
    """
    if (root / "train").is_dir():
        return bool(_visible_folders(root / "train"))
    if not root.is_dir() or has_validation_folder(root):
        return False
    return Match.PARTLY if any(_has_image(root / name) for name in _visible_folders(root)) else Match.NONE


def has_validation_folder(root: Path) -> bool:
    """Return whether the root has a validation folder."""
    return any((root / name).is_dir() for name in SPLITS["val"])


def is_image_name(name: str) -> bool:
    """Return whether a file name has the suffix of an image, including types that are not supported."""
    return _suffix(name) in _SUPPORTED | _UNSUPPORTED


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to a folder. Raises: InputError if it cannot be read."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # A link to itself: the caller treats it as a file.
        raise InputError(f"{entry.path}: cannot be read ({error.strerror}); make it readable, or remove it") from None


def read_folders(root: Path, split: Split, refuse: Refuse = raise_fault) -> ExampleTable:
    """Read the examples of one split. Without folders of splits, "train" holds all examples. No image is opened.

    The classes of both splits are the names of the folders in `train`, sorted. An id is the image's path without its
    suffix. Rows are sorted by class and path. Names that begin with a dot, and files without the suffix of an image,
    are ignored. Links are followed within the root.

    These are rejected:

    - a class folder that holds no image, is absent from `train`, or has a name that looks like another name;
    - a folder with images beside `train`, if there is no validation folder;
    - an image outside the class folders, an image of an unsupported type, and an image whose id is already in use;
    - a link out of the root, or into a parent folder;
    - a file beside the class folders that may hold the labels, such as labels.csv or metadata.jsonl, if its first
      65,536 characters name images of the split; an Excel or Parquet file is judged by its own name;
    - a name that is not UTF-8, and a file or folder that cannot be read.

    Raises:
        InputError: the folder of the split is missing, or holds no image that can be used.
    """
    root = root.absolute()
    train_folder = _split_folder(root, "train")
    if train_folder != root and not has_validation_folder(root):
        # If "train" is itself a class, the other classes would be left out.
        for other in sorted(name for name in _visible_folders(root) - {"train"} if _has_image(root / name)):
            advice = "move them into a class folder there, or call train/ something else if it is a class"
            refuse(f"{root / other}: images beside train/, which is taken for the training split; {advice}")
    names = _class_names(train_folder, refuse)
    check_distinct(names, lambda name: str(train_folder / name), refuse)
    folder = _split_folder(root, split)
    class_folders = _class_names(folder, refuse)
    for unknown_class in sorted({*class_folders} - {*names}):
        hint = nearest(unknown_class, names)
        refuse(f"{folder / unknown_class}: a class that {train_folder} does not have{hint}; rename or remove it")
    class_folders = [name for name in class_folders if name in names]
    outside = sorted(entry.name for entry in _entries(folder) if is_image_name(entry.name) and not is_folder(entry))
    for name in outside:
        refuse(f"{folder / name}: an image outside the class folders ({len(outside)} in all); move it into one")
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        of_classes = list(pool.map(lambda name: _class_images(root, folder / name), class_folders))
    for fault in (fault for _, faults in of_classes for fault in faults):
        refuse(fault)
    path = np.array([path.encode() for paths, _ in of_classes for path in paths], "S")
    if not len(path):
        raise InputError(f"{folder}: none of its files can be used; put an image into a class's folder")
    label = np.repeat(np.searchsorted(names, class_folders).astype(np.int32), [len(paths) for paths, _ in of_classes])
    ids = np.array([os.path.splitext(image_path)[0] for image_path in path.tolist()])
    for place in dict.fromkeys((root, folder)):
        _refuse_listings(place, _LISTINGS if folder == root else _METADATA, ids, names, refuse)
    table = ExampleTable(LocalFiles(root), ids, path, label, tuple(names))
    repeated = find_repeats(table.id)
    for _, first in repeated:
        refuse(f"{table.name(first)}: the name of another image differs only in the suffix; rename one of the two")
    return table.without([row for row, _ in repeated])


def _class_names(folder: Path, refuse: Refuse) -> list[str]:
    found = sorted(_visible_folders(folder))
    if not found:
        raise InputError(f"{folder}: no class folders; put the images of each class into a folder of its own")
    return [name for name in found if _is_utf8(folder, name, refuse)]


def _split_folder(root: Path, split: Split) -> Path:
    if split == "train" and holds_folders(root) is Match.PARTLY:
        return root
    if folder := next((root / name for name in SPLITS[split] if (root / name).is_dir()), None):
        return folder
    names = " or ".join(f"{name}/" for name in SPLITS[split])
    raise InputError(f"{root}: no folder {names}; put the {split} images there, in one folder per class")


def _visible_folders(folder: Path) -> set[str]:
    return {entry.name for entry in _entries(folder) if is_folder(entry)}


def _has_image(folder: Path) -> bool:
    # A folder that cannot be read counts as a folder without images. If the directory is of this format,
    # `read_folders` reports the fault.
    with suppress(OSError), os.scandir(folder) as entries:
        return any(_suffix(entry.name) in _SUPPORTED for entry in entries)
    return False


def _refuse_listings(
    folder: Path, pattern: re.Pattern[str], ids: np.ndarray, classes: Sequence[str], refuse: Refuse
) -> None:
    """Reject the files in a folder that may hold the labels, and log the names of the others."""
    files_beside = sorted(entry.name for entry in _entries(folder) if entry.is_file())
    for file in (folder / name for name in files_beside if pattern.fullmatch(name.lower())):
        with pass_faults_to(refuse):
            if _may_hold_labels(file, ids, classes):
                advice = "open a CSV file by its own path, or move the file to another folder"
                raise InputError(f"{file}: may hold other labels than the names of the folders; {advice}")
            _log.info("%s: not read; the names of the folders are the labels", file)


def _may_hold_labels(path: Path, ids: np.ndarray, classes: Sequence[str]) -> bool:
    """Return whether a file names images: one by its file name, or a quarter of its entries by names without suffix.

    A list of the classes is no such file, even if its numbers are also names of images.
    """
    if path.suffix.lower() in (".xls", ".xlsx", ".parquet"):
        return re.match(r"(labels|annotations|train|val|metadata)\.", path.name.lower()) is not None
    head = FolderFile(LocalFiles(path.parent), path.name).text()[:_HEAD]
    # A name may hold spaces, or commas within quotes, so a field is divided in each of these ways.
    fields = {*re.findall(r'"([^"\n]*)"', head), *re.split(r'[\n\t,;"]', head), *re.split(r"[^\w./\\-]+", head)}
    words = {re.split(r"[/\\]", field.strip())[-1] for field in fields}
    names = {os.fsdecode(image_id).rpartition("/")[2] for image_id in ids.tolist()}
    if any(is_image_name(word) and os.path.splitext(word)[0] in names for word in words):
        return True
    # An image may have several rows, and the set only some of the images. In JSON, each brace opens an entry.
    entries = head.count("{") or len(head.splitlines())
    is_class_list = 2 * len(words.intersection(classes)) >= entries
    return not is_class_list and 4 * len(words.intersection(names).difference(classes)) >= entries


def _class_images(root: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Return the images of a class's folder, as sorted paths relative to the root, and the faults of the folder."""
    faults: list[str] = []
    paths = sorted(os.path.relpath(path, root) for path in _images(root, folder, (), faults.append))
    if not paths and not faults:
        faults.append(f"{folder}: no image in this class's folder; put images there, or remove the folder")
    return paths, faults


def _images(root: Path, folder: Path, parents: tuple[str, ...], refuse: Refuse) -> Iterator[str]:
    """Yield every image below a folder; `parents` holds the real paths of its parent folders."""
    with pass_faults_to(refuse):
        real_path = _real_path(root, folder)
        if real_path in parents:
            raise InputError(f"{folder}: a symbolic link leads into a folder above itself; remove the link")
        for entry in sorted(_entries(folder), key=lambda entry: entry.name):
            with pass_faults_to(refuse):
                if is_folder(entry):
                    if _is_utf8(folder, entry.name, refuse):
                        yield from _images(root, folder / entry.name, (*parents, real_path), refuse)
                elif _suffix(entry.name) in _UNSUPPORTED:
                    raise InputError(f"{entry.path}: its image type is not supported; convert or remove it")
                elif _suffix(entry.name) in _SUPPORTED and _is_utf8(folder, entry.name, refuse):
                    if entry.is_symlink():
                        _real_path(root, folder / entry.name)
                    yield entry.path


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _real_path(root: Path, path: Path) -> str:
    """Return a path with its symbolic links resolved. Raises: InputError if it is outside the root."""
    if fault := link_out(os.fsencode(path), os.path.realpath(os.fsencode(root))):
        raise InputError(f"{path}: {fault}; put the files themselves into the root")
    return os.path.realpath(path)


def _is_utf8(folder: Path, name: str, refuse: Refuse) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        refuse(f"{folder}: the name {show(os.fsencode(name))} is not UTF-8; rename it")
        return False
    return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder whose names do not begin with a dot. Raises: InputError if it cannot be read."""
    with files.reading(folder, "make it a readable folder"), os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


_DESCRIPTION = "a directory with train/CLASS/IMAGE and val/CLASS/IMAGE, or with CLASS/IMAGE and data.val_share"
FORMATS.add("folders")(LocalFormat(_DESCRIPTION, holds_folders, read_folders, has_validation_folder, skips_faults=True))
