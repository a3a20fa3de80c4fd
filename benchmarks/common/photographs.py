"""Synthetic JPEG files, for benchmarks without a data set."""

from pathlib import Path

import numpy as np
from PIL import Image

from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

PHOTOGRAPHS, PHOTOGRAPH_SIZE, CLASSES = 512, 128, 10


def write_photographs(folder: Path, count: int = PHOTOGRAPHS, size: int = PHOTOGRAPH_SIZE) -> None:
    """Write smooth, grainy JPEG files, which decode at the speed of photographs."""
    rng = np.random.default_rng(0)
    edge = (size, size)
    for number in range(count):
        smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize(edge, Image.Resampling.BICUBIC)
        grain = rng.normal(0, 6, (*edge, 3))
        pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.jpg", quality=90)


def photograph_table(folder: Path, count: int = PHOTOGRAPHS) -> ExampleTable:
    names = np.array([f"{number:04d}.jpg".encode() for number in range(count)])
    label = (np.arange(count) % CLASSES).astype(np.int32)
    classes = tuple(f"n{label:08d}" for label in range(CLASSES))
    return ExampleTable(LocalFiles(folder), names, names, label, classes)
