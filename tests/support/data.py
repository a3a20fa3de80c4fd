"""Small networks and batches that several tests train."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from small_recipe import SmallNet as SmallNet

from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch

CLASSES = 5


SMALL = [
    *("--model.name", "resnet10", "--model.width", "2", "--train.label-smoothing", "0.1"),
    *("--data.image-size", "16", "--data.resize", "16", "--data.augment.pad", "1"),
    *("--train.batch-size", "8", "--eval.batch-size", "8", "--log.to", "jsonl,parameters"),
]
"""What makes `train digits` small."""


def random_batch(size: int, *, masked: int = 0, seed: int = 0, image: int = 6) -> Batch:
    """`size` random examples, of which the last `masked` are padding full of noise."""
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
    """`size` random images whose labels can be learned: a class is a colour, with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size)
    colours = np.random.default_rng(99).integers(40, 215, (CLASSES, 1, 1, 3))
    images = colours[labels] + rng.integers(-40, 41, (size, image, image, 3))
    return ArrayTable(images.astype(np.uint8), labels, tuple("abcde"))


def write_arrays(file: Path, train: ArrayTable, val: ArrayTable) -> Path:
    """Write two splits as one .npz file, the way `data.path` reads them."""
    tables = {"train": train, "val": val}
    arrays = {f"{split}_images": table.images for split, table in tables.items()}
    np.savez(file, **arrays, **{f"{split}_labels": table.labels for split, table in tables.items()})
    return file


def randomized(tree, seed: int = 7):
    """The same tree with every scale and bias random and positive, so that no gradient vanishes because one is zero."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    vectors = [jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, [v if x.ndim == 1 else x for x, v in zip(leaves, vectors, strict=True)])


def largest_difference(a, b) -> float:
    """Over all leaves of two trees of one shape: absolute below 1, relative above."""

    def difference(x, y) -> float:
        x, y = np.asarray(x), np.asarray(y)
        return float((np.abs(x - y) / np.maximum(1, np.abs(y))).max(initial=0))

    return max(jax.tree.leaves(jax.tree.map(difference, a, b)), default=0.0)


def linear_model(classes: int = CLASSES):
    """Softmax regression as a pair of functions: its gradient can be written down in one line."""

    def init(key, example):
        return {"weight": 0.1 * jax.random.normal(key, (example[0].size, classes), example.dtype)}

    def apply(params, images):
        return images.reshape(len(images), -1) @ params["weight"]

    return init, apply
