"""Writes a PNG file for each image: the image as the network sees it, with a heat map over it."""

import io
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import jaxddp.core.files as files

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST = 100


@dataclass(frozen=True)
class HeatMapFiles:
    """A folder with a file ROW-ID.png for each of `count` images.

    ROW is the number of the image from 0, so no two images have the same file. ID is the end of the image's id, in
    which characters other than ASCII letters, digits, "-" and "_" are replaced.
    """

    folder: Path
    count: int

    def create(self) -> str:
        """Create the folder if it does not exist, and return its path. Raises: InputError."""
        return str(files.create(self.folder))

    def path(self, row: int, image_id: str) -> Path:
        """Return the path of an image's file."""
        name = _UNSAFE.sub("_", image_id)[-_LONGEST:]
        return self.folder / f"{row:0{len(str(self.count - 1))}d}-{name}.png"

    def write(
        self, first: int, ids: Sequence[str], images: np.ndarray, heat_maps: np.ndarray, omitted: Collection[int]
    ) -> None:
        """Write the files of consecutive images, except for the `omitted` ones, which are numbered from 0.

        Args:
            first: the number of the first image.
            images: uint8 or uint16 [n, H, W, C].
            heat_maps: float[n, H, W].

        Raises:
            InputError: a file cannot be written.
        """
        from jaxddp.training.pictures import heat_map_over

        for index, image_id in enumerate(ids):
            if index not in omitted:
                file = io.BytesIO()
                picture = Image.fromarray(heat_map_over(images[index], heat_maps[index]))
                picture.save(file, "PNG")
                files.replace(self.path(first + index, image_id), file.getvalue())
