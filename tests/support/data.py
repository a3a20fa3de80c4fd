"""Batches, tables and files of random images."""

from pathlib import Path

import numpy as np
from PIL import Image

from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch

CLASSES = 5
NO_AUGMENTATION = DataConfig(augment=AugmentConfig(flip=False))
"""A config without augmentation, with which a step compiles in half the time."""


def random_batch(size: int, *, masked: int = 0, seed: int = 0, image: int = 6) -> Batch:
    """Return `size` random examples; the last `masked` are padding full of noise."""
    rng = np.random.default_rng(seed)
    mask = np.ones(size, np.float32)
    mask[size - masked :] = 0
    return Batch(
        image=rng.integers(0, 256, (size, image, image, 3), dtype=np.uint8),
        label=rng.integers(0, CLASSES, size).astype(np.int32),
        mask=mask,
        row=np.arange(size, dtype=np.int32),
        epoch=np.zeros(size, np.int32),
    )


def random_table(size: int, *, seed: int = 0, image: int = 6) -> ArrayTable:
    """Return `size` random images whose labels can be learned: a class is a colour with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size)
    colours = np.random.default_rng(99).integers(40, 215, (CLASSES, 1, 1, 3))
    images = colours[labels] + rng.integers(-40, 41, (size, image, image, 3))
    return ArrayTable(images.astype(np.uint8), labels, tuple("abcde"))


def write_arrays(file: Path, train: ArrayTable, val: ArrayTable) -> Path:
    """Write two splits as one .npz file, in the form that `data.path` reads."""
    tables = {"train": train, "val": val}
    arrays = {f"{split}_images": table.images for split, table in tables.items()}
    np.savez(file, **arrays, **{f"{split}_labels": table.labels for split, table in tables.items()})
    return file


def write_pictures(root: Path, train: int, val: int, image: int, suffix: str = "png") -> Path:
    """Write pictures of up to `image` pixels, in folders by split and class, and return their folder."""
    for split, count in {"train": train, "val": val}.items():
        table = random_table(count, seed=len(split), image=image)
        for row, pixels in enumerate(table.images):
            file = root / split / table.class_names[row % CLASSES] / f"{row:03d}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[: image - row % 5]).save(file)
    return root
