"""Small published data sets by name, whose files are fetched from their published addresses and verified.

`published.csv` has a line for each file: the name of the set, the address, the size in bytes, the SHA-256, and the
folder that an archive unpacks to. Addresses, bytes and digests are those of tensorflow-datasets 4.9, in its folder
`url_checksums`. All sets have a training and a validation split (the published test split):

- mnist: 70,000 handwritten digits, 28x28 gray, IDX files (Google's copy of http://yann.lecun.com/exdb/mnist)
- fashion_mnist: 70,000 pictures of clothing, 28x28 gray, IDX files (https://github.com/zalandoresearch/fashion-mnist)
- cifar10, cifar100: 60,000 photographs of 10 and of 100 classes, 32x32 RGB, their binary version
  (https://www.cs.toronto.edu/~kriz/cifar.html)
"""

import csv
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable, choices, show, size
from jaxddp.core.phases import doing
from jaxddp.data.formats.idx import CLASSES_FILE
from jaxddp.data.storage.web import fetch_file

LIST = Path(__file__).parent / "published.csv"
_CLASSES = {"fashion_mnist": "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot"}
"""The names of the classes of a set whose files have none, from its page."""


class PublishedFile(NamedTuple):
    """A file of a set; see the docstring of this module."""

    url: str
    size: int
    sha256: str
    unpacked: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def published_sets() -> dict[str, list[PublishedFile]]:
    """Return the files of each set, by its name."""
    sets = dict[str, list[PublishedFile]]()
    with LIST.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            known = PublishedFile(row["url"], int(row["size"]), row["sha256"], row["unpacked"])
            sets.setdefault(row["name"], []).append(known)
    return sets


def get_published(name: str, out: str | Path) -> Path:
    """Fetch the files of a published data set into a folder, and return the folder, for `open_data`.

    A file is written under a temporary name and renamed when its SHA-256 is verified. A file or an archive that is
    there already, for example from an interrupted call or from a browser, is used if its SHA-256 is right.

    Raises:
        InputError: there is no such set, a server no longer has a file, or the folder has other files or cannot be
            written.
        Unreachable: a server does not answer, or its file is damaged.
    """
    if name not in (sets := published_sets()):
        raise InputError(f"{show(name)}: no such published data set; {choices(name, sets)}")
    folder = files.create(Path(files.check_path(out, "out")))
    own = {CLASSES_FILE, *(text for file in sets[name] for text in (file.name, file.unpacked))}
    with files.readable_errors(folder):
        if others := sorted(entry for entry in os.listdir(folder) if not entry.startswith(".") and entry not in own):
            raise InputError(f"{folder}: holds {show(others[0])}, which is no file of {name}; give a new folder")
        with files.locked(folder, folder, is_folder=True):
            for file in sets[name]:
                if not (file.unpacked and (folder / file.unpacked).is_dir()):
                    _get(file, folder)
    if name in _CLASSES:
        names = (f"{each}\n".replace("_", " ") for each in _CLASSES[name].split())
        files.replace(folder / CLASSES_FILE, "".join(names).encode())
    return folder


def _get(file: PublishedFile, folder: Path) -> None:
    """Fetch a file, and unpack it if it is an archive. Raises: see `get_published`."""
    path, by_hand = folder / file.name, f"fetch this file ({size(file.size)}) elsewhere, and save it in {folder}"
    try:
        fetch_file(file.url, path, file.sha256, by_hand)
    except Unreachable as error:
        raise Unreachable(*error.problem, advice=() if by_hand in str(error) else f"or {by_hand}") from None
    if not file.unpacked:
        return
    unpacked = files.whole_folder(folder / file.unpacked)
    with doing(f"unpacking {path}"), unpacked as temporary, tarfile.open(path) as archive:
        for member in archive:
            if (content := archive.extractfile(member)) is not None:
                (temporary / Path(member.name).name).write_bytes(content.read())
    files.remove(path)
