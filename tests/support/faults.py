"""What goes wrong in a run on purpose."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxddp.data.arrays import ArrayTable
from support.data import random_table


def poisoned(*rows: int, table: ArrayTable | None = None) -> ArrayTable:
    """The table, one of 50 rows by default, with a first pixel in these rows that `spoil` knows."""
    table = random_table(50) if table is None else table
    images = np.minimum(table.images, 254)
    images[list(rows), 0, 0, 0] = 255
    return dataclasses.replace(table, images=images)


def spoil(key, image):
    """An augmentation that fails on the pixel 255, wherever a flip has brought it."""
    return jnp.where((image[..., 0] > (254.5 / 255 - 0.485) / 0.229).any(), jnp.nan, image)
