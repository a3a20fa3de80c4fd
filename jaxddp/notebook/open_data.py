"""Data of any form, opened for a notebook."""

import os
from dataclasses import replace

from jaxddp.config import DataConfig
from jaxddp.core.files import check_path
from jaxddp.core.ranges import HeldOut
from jaxddp.data.opening import open_held
from jaxddp.data.source import Source
from jaxddp.data.storage.catalog import place_of
from jaxddp.notebook.arguments import words_of_arguments
from jaxddp.overrides import checked


@words_of_arguments(
    {"data.path": "path", "data.val_share": "val_share", "data.classes": "classes", "data.manifest": "manifest"}
)
def open_data(
    path: str | os.PathLike[str],
    val_share: float | None = None,
    *,
    classes: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
) -> tuple[Source, Source]:
    """What to train on and what to validate on: a folder with a folder for each class, or any form of docs/data.md.

    Args:
        path: of a folder or a file, a URL, "tfds:NAME", or, where nothing lies there, a name in datasets.toml.
        val_share: where there is no validation split, the share of each class that is held out, above 0 and below 1.
        classes: a range of the classes, "0:200", or their ids, "cats,dogs"; where absent, all, or those of a name.
        manifest: what `jaxddp data check` wrote; each image is held against its SHA-256 whenever it is read.

    Raises:
        InputError: there is no such data set, it has no validation split and no `val_share` makes one, it is wrong, or
            the manifest does not list an image; names the file. Images are opened when they are read.
    """
    place = place_of(check_path(path, "path"))
    held_out = checked(val_share, HeldOut | None, "val_share")
    chosen = checked(classes, str | None, "classes") or place.classes
    data = DataConfig(path=place.path, train=place.train, val=place.val, val_share=held_out, classes=chosen)
    if manifest is not None:
        data = replace(data, verify="manifest", manifest=os.fspath(check_path(manifest, "manifest")))
    train, val = open_held(data).values()
    return train, val
