"""Pictures of examples, drawn as figures that a notebook shows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxddp.training.curves_figure import INK, VAL, Picture

_COLUMNS, _WIDE = 6, 8


def prediction_grid(
    images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray, class_names: Sequence[str]
) -> Picture:
    """Each image under its predicted class and that class's probability; a wrong one coloured, with the right class.

    Args:
        images: uint8[N, H, W, C], C of 1 or 3.
        labels: int[N]; -1 where unknown.
        probabilities: float[N, K].
    """
    picture, cells = _grid(len(images), _COLUMNS)
    for cell, image, label, row in zip(cells, images, labels, probabilities, strict=False):
        guess = int(row.argmax())
        _draw(cell, image)
        title = f"{short(class_names[guess])} {row[guess]:.0%}"
        wrong = label >= 0 and guess != label
        if wrong:
            title += f"\nis {short(class_names[int(label)])}"
        cell.set_title(title, fontsize=9, color=VAL if wrong else INK)
    return picture


def input_grid(images: np.ndarray, titles: Sequence[str]) -> Picture:
    """Each image under its title.

    Args:
        images: uint8[N, H, W, C], C of 1 or 3.
    """
    picture, cells = _grid(len(images), _WIDE)
    for cell, image, title in zip(cells, images, titles, strict=False):
        _draw(cell, image)
        cell.set_title(title, fontsize=7, color=INK)
    return picture


def short(name: str) -> str:
    """The first of a synset's names: "tench, Tinca tinca" is a tench."""
    return name.split(",")[0][:20]


def _grid(count: int, most_columns: int) -> tuple[Picture, Any]:
    """A picture of empty cells without axes, `most_columns` in a row at most."""
    columns = min(most_columns, count)
    rows = math.ceil(count / columns)
    picture = Picture(figsize=(1.9 * columns, 2.3 * rows), layout="constrained", facecolor="white")
    cells = picture.subplots(rows, columns, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    return picture, cells


def _draw(cell: Any, image: np.ndarray) -> None:
    cell.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
