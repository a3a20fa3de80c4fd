"""Faults of images in a run."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxddp.data.arrays import ArrayTable
from support.data import random_table


def poisoned(*rows: int, table: ArrayTable | None = None) -> ArrayTable:
    """Return a table, by default of 50 rows. `spoil` recognizes the first pixel of the given rows."""
    table = random_table(50) if table is None else table
    images = np.minimum(table.images, 254)
    images[list(rows), 0, 0, 0] = 255
    return dataclasses.replace(table, images=images)


def spoil(key, image):
    """Augment an image: return NaN if a red value is 255, also in a flipped image."""
    return jnp.where((image[..., 0] > (254.5 / 255 - 0.485) / 0.229).any(), jnp.nan, image)
