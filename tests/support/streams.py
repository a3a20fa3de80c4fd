"""Files of images that identify their row, and batches of them."""

from pathlib import Path

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable


def waves(row: int, height: int = 60, width: int = 80) -> np.ndarray:
    """Return a smooth colored picture with noise, which every resize and crop changes, uint8[height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 100 * np.sin(y / (7 + 3 * channel) + row) * np.cos(x / (5 + 2 * channel)) for channel in range(3)]
    noise = np.random.default_rng(row).normal(0, 8, (height, width, 3))
    return np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def table_of(root: Path, names: list[str]) -> ExampleTable:
    path = np.array([name.encode() for name in names])
    label = (np.arange(len(names)) % 3).astype(np.int32)
    return ExampleTable(LocalFiles(root), path, path, label, ("a", "b", "c"), ("ant", "bee", "cat"))


def assert_same(batches: list[Batch], others: list[Batch]) -> None:
    for batch, other in zip(batches, others, strict=True):
        assert batch.substituted is other.substituted is None
        for leaf, other_leaf in zip(batch[:5], other[:5], strict=True):
            assert leaf.dtype == other_leaf.dtype
            np.testing.assert_array_equal(leaf, other_leaf)


NUM_EXAMPLES, SIZE = 11, 24
DATA = DataConfig(image_size=SIZE, resize=SIZE)
SEED = 3


def write_table(root: Path, contents: list[bytes]) -> ExampleTable:
    names = [f"image {row} é.JPEG" for row in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        (root / name).write_bytes(content)
    return table_of(root, names)
