"""A tree with one folder a class as example tables; no file lists the images.

ROOT/train/<class>/**/*.jpg     jpg, jpeg, jpe, jfif, png, webp, tif, tiff or bmp
ROOT/val/<class>/**/*.jpg       or validation/, or test/, whichever there is first

Without a folder for validation, or without both (ROOT/<class>/**/*.jpg), `data.val_share` divides what is there.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np

import jaxddp.files as files
from jaxddp.data.format import LocalFormat, Match
from jaxddp.data.source import Split
from jaxddp.data.storage.local import LocalFiles, link_out
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError
from jaxddp.registry import FORMATS
from jaxddp.wording import nearest, show

_FOLDERS = {"train": ("train",), "val": ("val", "validation", "test")}
_IMAGES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp"})
# Skipping these silently would train on fewer images than there are.
_FOREIGN = frozenset({".gif", ".heic", ".avif", ".ppm", ".pgm"})

# Listing folders mostly waits for the disk or for a server.
_THREADS = 16


def holds_folders(root: Path) -> bool | Match:
    """Whether a directory looks like such a tree: it has a folder `train` with folders in it.

    Folders with images at their top, and none with the name of a split, are such a tree only if nothing else is there:
    another format may list them.
    """
    if (root / "train").is_dir():
        return bool(_visible_folders(root / "train"))
    if not root.is_dir() or has_validation_folder(root):
        return False
    return Match.PARTLY if any(map(_has_image, (root / name for name in _visible_folders(root)))) else Match.NONE


def has_validation_folder(root: Path) -> bool:
    """Whether there is a folder for validation."""
    return any((root / name).is_dir() for name in _FOLDERS["val"])


def is_image_name(name: str) -> bool:
    """Whether a file is called as an image is, be it of a kind that is read or not."""
    return os.path.splitext(name)[1].lower() in _IMAGES | _FOREIGN


def read_folders(root: Path, split: Split) -> ExampleTable:
    """Reads the examples of one split; all as "train" where there are no folders of splits. No image is opened.

    Classes are the names of the folders in `train`, sorted, for both splits; an id is the image's path without its
    suffix. Rows are sorted by class and path. Names that begin with a dot, and files without the suffix of an
    image, are left out. Links are followed within the root.

    Raises:
        InputError: names the folder that is missing, holds no image, is of a class that `train` does not have, or has
            images beside `train` where there is no folder for validation; a link that leads out of the root or into a
            folder above itself; two images of one id; an image of a kind that is not read.
    """
    home = root.absolute()
    trained = _split_folder(home, "train")
    if trained != home and not has_validation_folder(home):
        _refuse_beside(trained)
    names = tuple(_class_names(trained))
    folder = _split_folder(home, split)
    present = _class_names(folder)
    if unknown := sorted(set(present) - set(names)):
        raise InputError(
            f"{folder / unknown[0]}: a class that {trained} does not have{nearest(unknown[0], names)}; rename "
            "or remove the folder"
        )
    _refuse_strays(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda name: _class_images(home, folder / name), present))
    path = np.array([_encoded(home, path) for paths in found for path in paths])
    label = np.repeat(np.searchsorted(names, present).astype(np.int32), [len(paths) for paths in found])
    return ExampleTable(LocalFiles(home), _ids(home, path), path, label, names, names, tuple(range(len(names))))


def _class_names(folder: Path) -> list[str]:
    names = sorted(_visible_folders(folder))
    if not names:
        raise InputError(f"{folder}: no class folders; put the images of each class into a folder of its own")
    return names


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
        return {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}


def _has_image(folder: Path) -> bool:
    # What may not be read is said by the reader, if this is such a tree.
    with suppress(OSError), os.scandir(folder) as entries:
        return any(os.path.splitext(entry.name)[1].lower() in _IMAGES for entry in entries)
    return False


def _refuse_beside(trained: Path) -> None:
    """Raises `InputError` where train/ may be one class of several: the others would be left out."""
    home = trained.parent
    others = sorted(name for name in _visible_folders(home) if name != trained.name and _has_image(home / name))
    if others:
        raise InputError(
            f"{home / others[0]}: images beside {trained.name}/, which is taken for the training split; move them into "
            f"a class folder there, or call {trained.name}/ something else if it is a class"
        )


def _refuse_strays(folder: Path) -> None:
    with _listing(folder) as entries:
        strays = sorted(entry.name for entry in entries if entry.is_file() and _is_image(entry))
    if strays:
        raise InputError(
            f"{folder / strays[0]}: an image outside the class folders ({len(strays)} in all) has no class; move it "
            "into one"
        )


def _class_images(home: Path, folder: Path) -> list[str]:
    """The images below one class's folder, as paths relative to the root, sorted."""
    paths = sorted(os.path.relpath(path, home).replace(os.sep, "/") for path in _images(home, folder, ()))
    if not paths:
        raise InputError(f"{folder}: no image in this class's folder; put images there, or remove the folder")
    return paths


def _images(home: Path, folder: Path, above: tuple[str, ...]) -> Iterator[str]:
    """Yields every image below a folder. `above` is the real paths of the folders above it."""
    here = _within(home, folder)
    if here in above:
        raise InputError(f"{folder}: a symbolic link leads into a folder above itself, {here!r}; remove the link")
    with _listing(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _images(home, folder / entry.name, (*above, here))
            elif _is_image(entry):
                if entry.is_symlink():
                    _within(home, folder / entry.name)
                yield entry.path


def _is_image(entry: os.DirEntry[str]) -> bool:
    suffix = "" if entry.name.startswith(".") else os.path.splitext(entry.name)[1].lower()
    if suffix in _FOREIGN:
        raise InputError(f"{entry.path}: an image of a kind that is not read; convert it to PNG, or remove it")
    return suffix in _IMAGES


def _within(home: Path, path: Path) -> str:
    """The real path, links followed. Raises: InputError where it is outside the real root."""
    if fault := link_out(os.fsencode(path), os.path.realpath(os.fsencode(home))):
        raise InputError(f"{path}: {fault}; put the files themselves into the root")
    return os.path.realpath(path)


def _encoded(home: Path, path: str) -> bytes:
    try:
        return path.encode()
    except UnicodeEncodeError:
        raise InputError(f"{home}: the name {show(os.fsencode(path))} is not UTF-8; rename it") from None


def _ids(home: Path, path: np.ndarray) -> np.ndarray:
    """The paths without their suffixes, bytes 'S'[N]."""
    ids = np.array([os.path.splitext(one)[0] for one in path.tolist()])
    unique, first, count = np.unique(ids, return_index=True, return_counts=True)
    if len(unique) < len(ids):
        row = int(first[count > 1].min())
        raise InputError(
            f"{home / path[row].decode()}: another image has the same name but for the suffix, and ids are names "
            "without suffixes; rename either"
        )
    return ids


def _listing(folder: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    with files.reading(folder, "make it a readable folder"):
        return os.scandir(folder)


FORMATS.add("folders")(
    LocalFormat(
        "a directory with train/CLASS/IMAGE and val/CLASS/IMAGE, or with CLASS/IMAGE and data.val_share",
        holds_folders,
        read_folders,
        has_validation_folder,
    )
)
