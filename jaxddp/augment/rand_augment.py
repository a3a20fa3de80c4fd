"""RandAugment: random operations with one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

"paper": the 14 operations of the paper with the ranges of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501). At
magnitude 0 an operation has no effect. At the largest magnitude the parameters are: rotate 30 degrees, shear 0.3,
translate 150/331 of the side, solarize threshold 0 (from 256), posterize 4 bits (from 8), blend factor 0.9 away from 1.

"timm": the 15 operations of timm's "rand-m9-inc1" (github.com/huggingface/pytorch-image-models,
timm/data/auto_augment.py): invert and solarize_add in place of the identity, translations up to 0.45 of the side, and
posterize from 4 bits to 0.

Results equal Pillow's (ImageOps, ImageEnhance, nearest neighbour), except that a blend is rounded instead of truncated.
"""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.operations import (
    IDENTITY,
    OPERATIONS,
    Size,
    Space,
    drawn,
    on_planes,
    operate_all,
    rows,
    space_of,
)
from jaxddp.config import AugmentConfig

LARGEST = 10
QUANTILES = 100
"""The number of magnitudes, which are equally likely, if the magnitude is random."""


TIMM = (
    *("color", "contrast", "brightness", "sharpness", "autocontrast", "equalize", "rotate", "shear_x", "shear_y"),
    *("invert", "translate_x", "translate_y", "posterize", "solarize", "solarize_add"),
)
"""The operations of "timm", in the order in which they are drawn."""


def rand_space(settings: AugmentConfig, size: Size) -> Space:
    """Return the magnitudes of each operation for images of a size, from the smallest to the largest."""
    level = np.array([settings.rand_magnitude])
    if settings.rand_deviation:
        normal = NormalDist(settings.rand_magnitude, settings.rand_deviation)
        level = np.array([normal.inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)]).clip(0, LARGEST)
    share = level / LARGEST
    height, width = size
    if settings.rand_operations == "timm":
        others = {"posterize": 4 - np.floor(4 * share), "solarize": 256 - np.floor(256 * share)}
        others |= {"translate_x": np.round(0.45 * width * share), "translate_y": np.round(0.45 * height * share)}
        return space_of(TIMM, share, others | {"solarize_add": np.floor(110 * share)})
    others = {"posterize": 8 - np.round(4 * share), "solarize": np.round(256 * (1 - share))}
    others |= {"translate_x": -np.round(150 / 331 * width * share)}
    return space_of(OPERATIONS, share, others | {"translate_y": -np.round(150 / 331 * height * share)})


def rand_augment(key: jax.Array, image: jax.Array, settings: AugmentConfig) -> jax.Array:
    """Apply random operations to uint8[H, W, C], one for each layer.

    Operation, direction and magnitude of a layer are uniform and independent. A layer is skipped with probability
    1 - `settings.rand_probability`.
    """
    height, width, _ = image.shape
    space, layers = rand_space(settings, (height, width)), (settings.rand_augment,)
    table = np.array([rows(space, name) for name in space])
    count, levels, _, fields = table.shape
    operation_key, sign_key, level_key, use_key = jax.random.split(key, 4)
    operation = jax.random.randint(operation_key, layers, 0, count, jnp.int32)
    direction = (1 - jax.random.rademacher(sign_key, layers, jnp.int32)) // 2
    level = jax.random.randint(level_key, layers, 0, levels, jnp.int32)
    index = (operation * levels + level) * 2 + direction
    is_used = jax.random.bernoulli(use_key, jnp.float32(settings.rand_probability), layers)
    index = jnp.where(is_used, index, 2 * count * levels)
    parameters = drawn(np.concatenate([table.reshape(-1, fields), [IDENTITY]]), index)
    return on_planes(operate_all, image, parameters)
