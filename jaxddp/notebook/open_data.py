"""Opens data sets of all formats for the Python API."""

import os
from dataclasses import replace

from jaxddp.config import DataConfig
from jaxddp.core.files import check_path
from jaxddp.core.ranges import HeldOut
from jaxddp.data.opening import open_full_splits
from jaxddp.data.source import Source
from jaxddp.data.storage.root import find_dataset
from jaxddp.notebook.arguments import errors_name_arguments
from jaxddp.overrides import checked


@errors_name_arguments(
    {"data.path": "path", "data.val_share": "val_share", "data.classes": "classes", "data.manifest": "manifest"}
)
def open_data(
    path: str | os.PathLike[str],
    val_share: float | None = None,
    *,
    classes: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
) -> tuple[Source, Source]:
    """Open a data set: a folder with one folder per class, or any other format in docs/data.md.

    Args:
        path: a folder, a file, a URL, "hf:OWNER/NAME", "tfds:NAME", or a name in datasets.toml if there is no such
            file.
        val_share: the fraction of each class to hold out, above 0 and below 1, if the data have no validation split.
        classes: a range of classes, "0:200", or their ids, "cats,dogs". Default: the classes of the entry in
            datasets.toml, else all.
        manifest: a manifest of `jaxddp data check`. The SHA-256 of each image is compared with it on every read.

    Returns:
        The training data and the validation data.

    Raises:
        InputError: the data do not exist or are invalid, there is no validation split and no `val_share`, or the
            manifest does not list an image. This function does not open the images.
    """
    place = find_dataset(check_path(path, "path"))
    held_out = checked(val_share, HeldOut | None, "val_share")
    chosen = checked(classes, str | None, "classes") or place.classes
    data = DataConfig(path=place.path, train=place.train, val=place.val, val_share=held_out, classes=chosen)
    if manifest is not None:
        data = replace(data, verify="manifest", manifest=os.fspath(check_path(manifest, "manifest")))
    train, val = open_full_splits(data).values()
    return train, val
