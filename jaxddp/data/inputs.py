"""Open unlabelled images for prediction: a folder, files, a CSV file or a test listing."""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.data.formats.csv_listing import is_csv, read_paths
from jaxddp.data.formats.folders import is_folder, is_image_name
from jaxddp.data.formats.ilsvrc import TEST_CSV, test_listing
from jaxddp.data.storage.data_root import convert_os_errors, is_url, nearest_beside
from jaxddp.data.storage.local import LocalFiles
from jaxddp.data.table import ExampleTable


@convert_os_errors()
def open_inputs(places: Sequence[str | os.PathLike[str]]) -> ExampleTable:
    """Return a table of the images at some places, without opening them. Labels are -1, and there are no classes.

    A place is one of these:

    - a folder: all images below it, sorted by their paths, which are their ids;
    - an image file, whose id is the path as given;
    - a CSV file, as the only place: the images in its column `path`, relative to the folder of the CSV file;
    - a folder or URL of Kaggle's ILSVRC archive with LOC_sample_submission.csv, as the only place: the test images,
      whose ids are the values of the column ImageId.

    Symbolic links are followed, also to files outside these places.

    Raises:
        InputError: a place does not exist or has no image, or an image is given twice.
    """
    if not places:
        raise InputError("no images are given; give a folder, files, a CSV file, or a directory with a test listing")
    texts = [os.fspath(files.check_path(place, "images")) for place in places]
    listings = [_listing(text) for text in texts]
    listing = next((table for table in listings if table is not None), None)
    if listing is not None and len(texts) > 1:
        raise InputError(f"{texts[listings.index(listing)]}: lists images; give it alone")
    return listing or _table(list(chain.from_iterable(_images(text, alone=len(texts) == 1) for text in texts)))


def _listing(place: str) -> ExampleTable | None:
    """Return the table of a CSV file or a test listing; None for folders and image files."""
    path = files.expanded(place)
    if is_url(place) or (path / TEST_CSV).is_file():
        return test_listing(place)
    return read_paths(path.absolute()) if is_csv(path) and path.is_file() else None


def _images(place: str, *, alone: bool) -> Iterator[tuple[str, str]]:
    """Yield (id, real path) for each image of a folder, or for a single image file."""
    path = files.expanded(place)
    if path.is_file():
        yield place, os.path.realpath(path)
    elif not path.is_dir():
        raise InputError(f"{place}: no such file or folder{nearest_beside(path.absolute())}; check the path")
    else:
        below = sorted(_below(path, "", ()))
        if not below:
            raise InputError(f"{place}: no image below this folder; check the path")
        for name in below:
            yield name if alone else os.path.join(place, name), os.path.realpath(path / name)


def _below(top: Path, folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of all images below a folder; `above` has the real paths of its parent folders."""
    real_path = os.path.realpath(top / folder)
    if real_path in above:
        return  # A link to a parent folder: the images of that folder are found without the link.
    with files.reading(top / folder, "make it a readable folder"):
        entries = [*os.scandir(top / folder)]
    for entry in entries:
        name = os.path.join(folder, entry.name)
        if entry.name.startswith("."):
            continue
        if is_folder(entry):
            yield from _below(top, name, (*above, real_path))
        elif is_image_name(entry.name):
            yield name


def _table(images: list[tuple[str, str]]) -> ExampleTable:
    # Ids are written to text files, so bytes that are not UTF-8 are replaced.
    ids = [os.fsencode(name).decode(errors="replace").encode() for name, _ in images]
    unique, count = np.unique(np.array(ids), return_counts=True)
    if len(unique) < len(ids):
        raise InputError(f"{os.fsdecode(unique[count > 1][0])}: is given twice; give each image once")
    unknown = np.full(len(ids), -1, np.int32)
    # Links are resolved, so the files may be anywhere on the machine, and the root of the store is `/`.
    paths = np.array([os.fsencode(path).removeprefix(b"/") for _, path in images])
    return ExampleTable(LocalFiles(Path("/")), np.array(ids), paths, unknown)
