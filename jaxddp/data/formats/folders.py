"""Reads a tree with one folder for each class; no file lists the images.

ROOT/train/<class>/**/*.jpg     or another name of `find_split`, such as seg_train/, or the folder that data.train names
ROOT/val/<class>/**/*.jpg       or validation/, seg_test/ …, or the folder that data.val names
ROOT/<class>/**/*.jpg           in place of train/

Without a validation folder, `data.val_share` divides the images. A folder test/ or val/ without folders of classes has
no labels, and is passed over.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, Key, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, pass_faults_to, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.splits import SPLITS, find_split, is_word, rank
from jaxddp.data.source import Split
from jaxddp.data.storage.root import HEAD, FolderFile
from jaxddp.data.storage.store import LocalFiles, is_passed_over
from jaxddp.data.storage.tar import IMAGES
from jaxddp.data.table import ExampleTable

_log = logging.getLogger("jaxddp.data")
_DATA = DataConfig()
# A file of these names beside the class folders may hold the labels, which a run would ignore.
_LISTINGS = re.compile(r".*\.(csv|tsv|xlsx?)|(labels|annotations|train|val|metadata)\.(txt|jsonl?|parquet)")
_METADATA = re.compile(r"metadata\.(csv|jsonl|parquet)")
"""The labels of an `ImageFolder` of the library `datasets`; files of other names are usual beside train/ and val/."""
_NO_CLASSES = re.compile("images?|imgs?|jpe?g|jpegimages|labels|annotations|masks")
"""Names of folders, in lower case, that are no classes."""
_TABLE = re.compile(r"(?!test|sample).*\.[ct]sv")

# Listing folders mostly waits for the disk or for a server.
_LISTING_THREADS = 16


@dataclass(frozen=True)
class FolderLayout:
    """The folders of a tree that `read_folders` reads."""

    root: Path
    splits: dict[Split, Path]
    """The folder of each split, which has a folder for each class. "train" may be the root."""
    others: frozenset[str] = frozenset()
    """If "train" is the root: the names of its folders that are no classes."""
    unlabelled: tuple[str, ...] = ()
    """The names of folders for validation or testing that have no folders of classes."""
    is_named: bool = False
    """Whether the config names the training folder."""

    def reading(self, split: Split) -> str:
        """Return a phrase for `ExampleTable.reading`."""
        folder = self.splits[split]
        place = self.root.name if folder == self.root else folder.relative_to(self.root)
        passed = "".join(f"; {name}/ has no labels" for name in self.unlabelled)
        passed += f"; {self.root.name}/ in it is a copy" if self.root.name in self.others else ""
        return f"class folders in {place}/{passed}"


def find_layout(root: Path, data: DataConfig = _DATA) -> FolderLayout:
    """Return the layout of a directory; without splits if it has no folders of classes.

    Raises: InputError if it has several readings, or lacks a folder that the config names.
    """
    root = root.absolute()
    folders = visible_folders(root) if root.is_dir() else set()
    within = visible_folders(root / root.name) if root.name in folders else set()
    copy = {root.name} if within and within < folders else set()
    splits: dict[Split, Path] = {}
    for split in SPLITS:
        if getattr(data, split):
            splits[split] = _named_folder(root, split, data)
        elif name := find_split(split, (name for name in folders if _holds_classes(root / name, split)), root):
            splits[split] = _undoubled(root / name)
    if data.val and splits.get("train", root) == splits["val"]:
        raise InputError(Key("data.val", data.val), ": is also the training split", advice="name another folder")
    unlabelled = {name for name in folders if rank(name, "val") and not _holds_classes(root / name, "val")}
    # Otherwise the folders of the root are the classes, except those with the name of a split.
    others = {name for name in folders if is_word(name, "val")} | copy
    others |= {splits["val"].relative_to(root).parts[0]} if data.val else set()
    classes = sorted(name for name in folders - others if "train" not in splits and _has_image(root / name))
    if unlabelled.issuperset(classes):
        return FolderLayout(root, splits, unlabelled=(*sorted(unlabelled),), is_named=bool(data.train))
    flat = [name for name in classes if _is_between(name, root)]
    if unlabelled or others or len(classes) == 1:
        flat += [name for name in classes if rank(name, "train")]
    if flat:
        tables = sorted(entry.path for entry in visible_entries(root) if _TABLE.fullmatch(entry.name.lower()))
        advice = f"give {tables[0]}" if tables else "list path,label in train.csv"
        fault = "images, but no class folders; put the images of each class into a folder of its own"
        raise InputError(f"{root / flat[0]}: {fault}, or {advice}")
    if len(classes) == 1 and others & unlabelled:
        both = f"{classes[0]}/ and {min(others)}/ are two classes, or {min(others)}/ has images without labels"
        raise InputError(f"{root}: {both}; put classes into a folder train/")
    splits = {split: place for split, place in splits.items() if place.relative_to(root).parts[0] in others}
    return FolderLayout(root, {"train": root, **splits}, frozenset(others), (*sorted(others & unlabelled),))


def image_names(folder: Path) -> list[str]:
    """Return the names of the images in a folder, without those in its folders, sorted."""
    return sorted(entry.name for entry in visible_entries(folder) if is_image_name(entry.name) and not is_folder(entry))


def _named_folder(root: Path, split: Split, data: DataConfig) -> Path:
    """Return the folder that `data.train` or `data.val` names."""
    name = getattr(data, split)
    key, folder = Key(f"data.{split}", name), Path(os.path.normpath(root / name))
    if root not in folder.parents:
        advice = ("give a folder that holds both splits by ", Key("data.path"))
        raise InputError(key, f": is no folder below {root}", advice=advice)
    if not folder.is_dir() or not visible_folders(folder):
        fault = "no class folders" if folder.is_dir() else f"no such folder{files.nearest_beside(folder)}"
        raise InputError(key, f": {folder}: {fault}", advice="name a folder with one folder for each class")
    return _undoubled(folder)


def _holds_classes(folder: Path, split: Split) -> bool:
    """Return whether a folder has the name of a split, and folders of classes.

    Folders like images/ and one with the same name are none, unless they have folders (test/test/1.jpg).
    """
    found = visible_folders(folder) if rank(folder.name, split) else set()
    return any(not _is_between(name, folder) or visible_folders(folder / name) for name in found)


def _is_between(name: str, folder: Path) -> bool:
    return name == folder.name or _NO_CLASSES.fullmatch(name.lower()) is not None


def _undoubled(folder: Path) -> Path:
    """Return a folder, or the only folder in it if that is no class, as seg_train/seg_train/ and train/images/."""
    (name, *others) = visible_folders(folder) or {""}
    return folder / name if not others and _is_between(name, folder) and not _has_image(folder) else folder


def is_image_name(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return _suffix(name) in IMAGES


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to a folder.

    Raises: InputError if it cannot be read, or is a link to itself or to a file or folder that does not exist.
    """
    try:
        if entry.is_symlink() and not os.path.exists(entry.path):
            target = show(os.readlink(entry.path))
            raise InputError(f"{entry.path}: a symbolic link that leads nowhere, to {target}; correct or remove it")
        return entry.is_dir()
    except OSError as error:
        raise InputError(f"{entry.path}: cannot be read ({error.strerror}); make it readable, or remove it") from None


def read_folders(
    root: Path, split: Split, refuse: Refuse = raise_fault, layout: FolderLayout | None = None
) -> ExampleTable:
    """Read the examples of one split of a layout; by default, that of `find_layout`. No image is opened.

    The classes of both splits are the names of the folders of the training split, sorted. An id is the image's path
    without its suffix; images whose paths differ only in the suffix keep it. Rows are sorted by class and path. Names
    of `is_passed_over`, and files without the suffix of an image, are ignored. Links are followed wherever they lead.

    These are rejected:

    - a class folder that holds no image, is absent from the training split, or has a name that looks like another name;
    - a folder with images beside the training folder, if there is no validation folder and the config names none;
    - an image outside the class folders, and an image of a type that Pillow needs another library for;
    - a link that leads nowhere, or into a parent folder;
    - a file beside the class folders that may hold the labels, such as labels.csv or metadata.jsonl, if its first
      65,536 characters name images of the split; an Excel or Parquet file is judged by its own name;
    - a name that is not UTF-8, and a file or folder that cannot be read.

    Raises: InputError if the folder of the split is missing, or holds no image that can be used.
    """
    root, layout = root.absolute(), layout or find_layout(root)
    if split not in layout.splits:
        names = " or ".join(f"{name}/" for name in SPLITS[split])
        raise InputError(f"{root}: no folder {names}; put the {split} images there, in one folder per class")
    folder = layout.splits[split]
    train_folder = layout.splits.get("train", folder)
    if "val" not in layout.splits and train_folder != root and not layout.is_named:
        _refuse_beside(train_folder.relative_to(root).parts[0], root, refuse)
    names = class_names(layout, "train" if "train" in layout.splits else split, refuse)
    check_distinct(names, lambda name: str(train_folder / name), refuse)
    class_folders = class_names(layout, split, refuse)
    for unknown_class in sorted({*class_folders} - {*names}):
        hint = nearest(unknown_class, names)
        refuse(f"{folder / unknown_class}: a class that {train_folder} does not have{hint}; rename or remove it")
    class_folders = [name for name in class_folders if name in names]
    for name in (outside := image_names(folder)):
        refuse(f"{folder / name}: an image outside the class folders ({len(outside)} in all); move it into one")
    with ThreadPoolExecutor(_LISTING_THREADS) as pool:
        of_classes = list(pool.map(lambda name: _class_images(root, folder / name), class_folders))
    for _, faults in of_classes:
        for fault in faults:
            refuse(fault)
    path = np.array([path.encode() for paths, _ in of_classes for path in paths], "S")
    if not len(path):
        raise InputError(f"{folder}: none of its files can be used; put an image into a class's folder")
    label = np.repeat(np.searchsorted(names, class_folders).astype(np.int32), [len(paths) for paths, _ in of_classes])
    stems = np.array([os.path.splitext(image_path)[0] for image_path in path.tolist()])
    for place in dict.fromkeys((root, folder)):
        _refuse_listings(place, _LISTINGS if folder == root else _METADATA, stems, names, refuse)
    ids, reading = stems.tolist(), layout.reading(split)
    # An image's path may be the path of another image without its suffix, so look again.
    while rows := {row for pair in find_repeats(np.array(ids)) for row in pair}:
        for row in rows:
            ids[row] = path[row]
    if any(_suffix(os.fsdecode(one)) == "gif" for one in path.tolist()):
        reading += "; of a GIF, the first frame"
    return ExampleTable(LocalFiles(root, True), np.array(ids), path, label, tuple(names), reading=reading)


def _refuse_beside(top: str, root: Path, refuse: Refuse) -> None:
    """Reject the folders with images beside a folder whose name is a word for "train", but which may be a class."""
    beside = {name for name in visible_folders(root) - {top} if not rank(name, "val") and _has_image(root / name)}
    for other in sorted(beside):
        advice = f"move them into a class folder there, or call {top}/ something else if it is a class"
        refuse(f"{root / other}: images beside {top}/, which is taken for the training split; {advice}")


def class_names(layout: FolderLayout, split: Split, refuse: Refuse = raise_fault) -> list[str]:
    """Return the names of the class folders of a split, sorted. Raises: InputError if there are none."""
    names = list[str]()
    folder = layout.splits[split]
    for entry in sorted(visible_entries(folder), key=lambda entry: entry.name):
        with pass_faults_to(refuse):
            is_other = folder == layout.root and entry.name in layout.others
            if is_folder(entry) and not is_other and _is_utf8(folder, entry.name, refuse):
                names.append(entry.name)
    if not names:
        raise InputError(f"{folder}: no class folders; put the images of each class into a folder of its own")
    return names


def visible_folders(folder: Path) -> set[str]:
    """Return the names of the folders in a folder. Raises: InputError if it cannot be read."""
    return {entry.name for entry in visible_entries(folder) if entry.is_dir()}


def _has_image(folder: Path) -> bool:
    # A folder that cannot be read counts as a folder without images. If the directory is of this format,
    # `read_folders` reports the fault.
    with suppress(OSError), os.scandir(folder) as entries:
        return any(is_image_name(entry.name) and not is_passed_over(entry.name) for entry in entries)
    return False


def _refuse_listings(
    folder: Path, pattern: re.Pattern[str], ids: np.ndarray, classes: Sequence[str], refuse: Refuse
) -> None:
    """Reject the files in a folder that may hold the labels, and log the names of the others."""
    names = sorted(entry.name for entry in visible_entries(folder) if entry.is_file())
    for file in [folder / name for name in names if pattern.fullmatch(name.lower())]:
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
    head = FolderFile(LocalFiles(path.parent), path.name).text(HEAD)
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
    parents = (os.path.realpath(folder.parent),)
    paths = sorted(os.path.relpath(path, root) for path in _images(folder, parents, faults.append))
    if not paths and not faults:
        faults.append(f"{folder}: no image in this class's folder; put images there, or remove the folder")
    return paths, faults


def _images(folder: Path, parents: tuple[str, ...], refuse: Refuse) -> Iterator[str]:
    """Yield every image below a folder; `parents` holds the real paths of its parent folders."""
    with pass_faults_to(refuse):
        real_path = os.path.realpath(folder)
        if any(os.path.join(parent, "").startswith(os.path.join(real_path, "")) for parent in parents):
            raise InputError(f"{folder}: a symbolic link leads into a folder above itself; remove the link")
        for entry in sorted(visible_entries(folder), key=lambda entry: entry.name):
            with pass_faults_to(refuse):
                if is_folder(entry):
                    if _is_utf8(folder, entry.name, refuse):
                        yield from _images(folder / entry.name, (*parents, real_path), refuse)
                elif is_image_name(entry.name) and _is_utf8(folder, entry.name, refuse):
                    if _suffix(entry.name) in ("heic", "heif"):
                        # Pillow takes a while to import.
                        from jaxddp.data.images import check_readable

                        check_readable("heif", entry.path)
                    yield entry.path


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1][1:].lower()


def _is_utf8(folder: Path, name: str, refuse: Refuse) -> bool:
    with suppress(UnicodeEncodeError):
        name.encode()
        return True
    refuse(f"{folder}: the name {show(os.fsencode(name))} is not UTF-8; rename it")
    return False


def visible_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not passed over. Raises: InputError if it cannot be read."""
    with files.reading(folder, "make it a readable folder"), os.scandir(folder) as entries:
        return [entry for entry in entries if not is_passed_over(entry.name)]


def _layout_of(place: Place) -> FolderLayout:
    """Return the layout of a local place. Raises: see `find_layout`."""
    if "folders" not in place.found:
        place.found["folders"] = find_layout(place.path, place.data)
    return place.found["folders"]


class ClassFolders:
    """The format of trees of class folders."""

    description = "a directory with train/CLASS/IMAGE and val/CLASS/IMAGE, or with CLASS/IMAGE and data.val_share"

    def match(self, place: Place) -> Match:
        """Return the degree of the match. A folder `train`, or one that the config names, is a sure sign."""
        if place.local is None:
            return Match.NONE
        try:
            splits = _layout_of(place).splits
        except InputError:
            return Match.PARTLY
        if any(place.local / name in splits.values() for name in (place.data.train, place.data.val) if name):
            return Match.NAMED
        if not splits:
            return Match.NONE
        return Match.WHOLE if splits.get("train", place.local).name == "train" else Match.PARTLY

    def divided(self, place: Place) -> bool:
        return place.local is not None and "val" in _layout_of(place).splits

    def open(self, place: Place, split: Split) -> ExampleTable:
        return read_folders(place.path, split, place.refuse, _layout_of(place)).select(place.data.classes)


FORMATS.add("folders")(ClassFolders())
