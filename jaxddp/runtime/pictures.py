"""Pictures of examples, drawn as figures that a notebook shows."""

import math
from collections.abc import Sequence

import numpy as np

from jaxddp.runtime.listeners.curves import INK, VAL, Picture

_COLUMNS = 6


def prediction_grid(
    images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray, class_names: Sequence[str]
) -> Picture:
    """Each image under its predicted class and that class's probability; a wrong one coloured, with the right class.

    Args:
        images: uint8[N, H, W, C], C of 1 or 3.
        labels: int[N]; -1 where unknown.
        probabilities: float[N, K].
    """
    columns = min(_COLUMNS, len(images))
    rows = math.ceil(len(images) / columns)
    picture = Picture(figsize=(1.9 * columns, 2.3 * rows), layout="constrained", facecolor="white")
    axes = picture.subplots(rows, columns, squeeze=False).ravel()
    for cell in axes:
        cell.set_axis_off()
    for cell, image, label, row in zip(axes, images, labels, probabilities, strict=False):
        guess = int(row.argmax())
        cell.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
        title = f"{_short(class_names[guess])} {row[guess]:.0%}"
        wrong = label >= 0 and guess != label
        if wrong:
            title += f"\nis {_short(class_names[int(label)])}"
        cell.set_title(title, fontsize=9, color=VAL if wrong else INK)
    return picture


def _short(name: str) -> str:
    """The first of a synset's names: "tench, Tinca tinca" is a tench."""
    return name.split(",")[0][:20]
