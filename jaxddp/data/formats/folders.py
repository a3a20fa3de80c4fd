"""Reads a tree with one folder for each class; no file lists the images.

ROOT/train/<class>/**/*.jpg     jpg, jpeg, jpe, jfif, png, webp, tif, tiff or bmp
ROOT/val/<class>/**/*.jpg       or validation/, or test/: the first of these that exists

Without a validation folder, or without both folders (ROOT/<class>/**/*.jpg), `data.val_share` divides the images.
"""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import nearest, show
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, pass_faults_to, raise_fault
from jaxddp.data.format import LocalFormat, Match
from jaxddp.data.source import Split
from jaxddp.data.storage.local import LocalFiles, link_out
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS

_FOLDERS = {"train": ("train",), "val": ("val", "validation", "test")}
_IMAGES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp"})
# Image files of these kinds are an error, because a run without them would train on fewer images.
_FOREIGN = frozenset({".gif", ".heic", ".avif", ".ppm", ".pgm"})

# Listing folders mostly waits for the disk or for a server.
_THREADS = 16


def holds_folders(root: Path) -> bool | Match:
    """Returns whether a directory looks like such a tree: it has a folder `train` that contains folders.

    A directory that has no folders of splits but other folders with images is a partial match, because its images may
    belong to another format.
    """
    if (root / "train").is_dir():
        return bool(_visible_folders(root / "train"))
    if not root.is_dir() or has_validation_folder(root):
        return False
    return Match.PARTLY if any(map(_has_image, (root / name for name in _visible_folders(root)))) else Match.NONE


def has_validation_folder(root: Path) -> bool:
    """Returns whether there is a validation folder."""
    return any((root / name).is_dir() for name in _FOLDERS["val"])


def is_image_name(name: str) -> bool:
    """Returns whether a file has the suffix of an image, including kinds of images that are not read."""
    return os.path.splitext(name)[1].lower() in _IMAGES | _FOREIGN


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a folder, or a link to one. Raises: InputError if it may not be read."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # A link to itself is not a folder. The caller treats it as a file.
        raise InputError(f"{entry.path}: cannot be read ({error.strerror}); make it readable, or remove it") from None


def read_folders(root: Path, split: Split, refuse: Refuse = raise_fault) -> ExampleTable:
    """Reads the examples of one split. Without folders of splits, "train" holds all examples. No image is opened.

    The classes of both splits are the names of the folders in `train`, sorted. An id is the image's path without its
    suffix. Rows are sorted by class and path. Names that begin with a dot, and files without the suffix of an image,
    are ignored. Links are followed within the root.

    These are rejected:

    - a folder of a class that holds no image, that `train` does not have, or whose name looks like another name;
    - a folder with images beside `train`, if there is no validation folder;
    - an image outside the folders of classes, one of a type that is not supported, and two images with the same id;
    - a link out of the root, or into a parent folder;
    - a name that is not UTF-8, and a file or folder that cannot be read.

    Raises:
        InputError: there is no such folder, or no image in it.
    """
    home = root.absolute()
    trained = _split_folder(home, "train")
    if trained != home and not has_validation_folder(home):
        _refuse_beside(trained, refuse)
    names = tuple(_class_names(trained, refuse))
    check_distinct(names, lambda name: str(trained / name), refuse)
    folder = _split_folder(home, split)
    present = _class_names(folder, refuse)
    for unknown in sorted({*present} - {*names}):
        refuse(
            f"{folder / unknown}: a class that {trained} does not have{nearest(unknown, names)}; rename "
            "or remove the folder"
        )
    present = [name for name in present if name in names]
    _refuse_strays(folder, refuse)
    with ThreadPoolExecutor(_THREADS) as pool:
        of_classes = list(pool.map(lambda name: _class_images(home, folder / name), present))
    for fault in (fault for _, faults in of_classes for fault in faults):
        refuse(fault)
    path = np.array([path.encode() for paths, _ in of_classes for path in paths], "S")
    if not len(path):
        raise InputError(f"{folder}: none of its files can be used; put an image into a class's folder")
    label = np.repeat(np.searchsorted(names, present).astype(np.int32), [len(paths) for paths, _ in of_classes])
    ids = np.array([os.path.splitext(one)[0] for one in path.tolist()])
    table = ExampleTable(LocalFiles(home), ids, path, label, names, made_of="file")
    return table.without(_repeated(table, refuse))


def _class_names(folder: Path, refuse: Refuse) -> list[str]:
    names = sorted(_visible_folders(folder))
    if not names:
        raise InputError(f"{folder}: no class folders; put the images of each class into a folder of its own")
    for name in names:
        with pass_faults_to(refuse):
            _check_utf8(folder, name)
    return [name for name in names if _is_utf8(name)]


def _split_folder(home: Path, split: Split) -> Path:
    if split == "train" and holds_folders(home) is Match.PARTLY:
        return home
    for name in _FOLDERS[split]:
        if (home / name).is_dir():
            return home / name
    names = " or ".join(f"{name}/" for name in _FOLDERS[split])
    raise InputError(f"{home}: no folder {names}; put the {split} images there, in one folder a class")


def _visible_folders(folder: Path) -> set[str]:
    with _listing(folder) as entries:
        return {entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry)}


def _has_image(folder: Path) -> bool:
    # A folder that cannot be read is treated as one without images. If the directory is a tree of classes,
    # `read_folders` reports the folder.
    with suppress(OSError), os.scandir(folder) as entries:
        return any(os.path.splitext(entry.name)[1].lower() in _IMAGES for entry in entries)
    return False


def _refuse_beside(trained: Path, refuse: Refuse) -> None:
    """Rejects image folders beside train/: if "train" is a class too, the other classes would be left out."""
    home = trained.parent
    for other in sorted(name for name in _visible_folders(home) if name != trained.name and _has_image(home / name)):
        refuse(
            f"{home / other}: images beside {trained.name}/, which is taken for the training split; move them into "
            f"a class folder there, or call {trained.name}/ something else if it is a class"
        )


def _refuse_strays(folder: Path, refuse: Refuse) -> None:
    with _listing(folder) as entries:
        strays = sorted(one.name for one in entries if _suffix(one) in _IMAGES | _FOREIGN and not is_folder(one))
    for name in strays:
        refuse(
            f"{folder / name}: an image outside the class folders ({len(strays)} in all) has no class; move it into one"
        )


def _class_images(home: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Returns the images below one class's folder, as sorted paths relative to the root, and its faults."""
    faults: list[str] = []
    images = _images(home, folder, (), faults.append)
    paths = sorted(os.path.relpath(path, home).replace(os.sep, "/") for path in images)
    if not paths and not faults:
        faults.append(f"{folder}: no image in this class's folder; put images there, or remove the folder")
    return paths, faults


def _images(home: Path, folder: Path, above: tuple[str, ...], refuse: Refuse) -> Iterator[str]:
    """Yields every image below a folder; `above` is the real paths of its parent folders."""
    with pass_faults_to(refuse):
        real_path = _within(home, folder)
        if real_path in above:
            raise InputError(
                f"{folder}: a symbolic link leads into a folder above itself, {real_path!r}; remove the link"
            )
        with _listing(folder) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
        for entry in entries:
            try:
                if entry.name.startswith("."):
                    continue
                if is_folder(entry):
                    _check_utf8(folder, entry.name)
                    yield from _images(home, folder / entry.name, (*above, real_path), refuse)
                elif _is_image(entry):
                    _check_utf8(folder, entry.name)
                    if entry.is_symlink():
                        _within(home, folder / entry.name)
                    yield entry.path
            except InputError as error:
                refuse(str(error))


def _is_image(entry: os.DirEntry[str]) -> bool:
    suffix = _suffix(entry)
    if suffix in _FOREIGN:
        raise InputError(f"{entry.path}: its image type is not supported; convert it to PNG, or remove it")
    return suffix in _IMAGES


def _suffix(entry: os.DirEntry[str]) -> str:
    return "" if entry.name.startswith(".") else os.path.splitext(entry.name)[1].lower()


def _within(home: Path, path: Path) -> str:
    """Returns the real path, with links followed. Raises: InputError if it is outside the real root."""
    if fault := link_out(os.fsencode(path), os.path.realpath(os.fsencode(home))):
        raise InputError(f"{path}: {fault}; put the files themselves into the root")
    return os.path.realpath(path)


def _check_utf8(folder: Path, name: str) -> None:
    if not _is_utf8(name):
        raise InputError(f"{folder}: the name {show(os.fsencode(name))} is not UTF-8; rename it")


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _repeated(table: ExampleTable, refuse: Refuse) -> list[int]:
    """Returns and rejects the rows whose id is also the id of an earlier row."""
    again = find_repeats(table.id)
    for _, first in again:
        refuse(
            f"{table.name(first)}: the name of another image differs only in the suffix, and ids are names without "
            "suffixes; rename either"
        )
    return [row for row, _ in again]


def _listing(folder: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    with files.reading(folder, "make it a readable folder"):
        return os.scandir(folder)


FORMATS.add("folders")(
    LocalFormat(
        "a directory with train/CLASS/IMAGE and val/CLASS/IMAGE, or with CLASS/IMAGE and data.val_share",
        holds_folders,
        read_folders,
        has_validation_folder,
        skips_faults=True,
    )
)
