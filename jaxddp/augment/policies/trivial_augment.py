"""TrivialAugment: one random operation with a random magnitude (Müller & Hutter 2021, arXiv:2103.10158)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.operations import OPERATIONS, Space, drawn, operate, rows
from jaxddp.config import AugmentConfig
from jaxddp.config.registry import POLICIES

BINS = 31


def wide_space() -> dict[str, Space]:
    """Return the space of TrivialAugment Wide: 31 magnitudes of each operation that has a magnitude.

    The ranges are those of table 6 of the paper. The largest translation is 32 pixels for images of any size. The
    solarize thresholds and the number of bits of posterize are torchvision's.
    """
    steps = np.arange(BINS) / (BINS - 1)
    spaces = {name: Space(0.99 * steps, True) for name in ("shear_x", "shear_y")}
    spaces |= {name: Space(32 * steps, True) for name in ("translate_x", "translate_y")}
    spaces |= {name: Space(0.99 * steps, True) for name in ("brightness", "color", "contrast", "sharpness")}
    return spaces | {
        "rotate": Space(135 * steps, True),
        "posterize": Space(8 - np.round(6 * steps), False),
        "solarize": Space(255 - 255 * steps, False),
        **{name: Space(np.zeros(BINS), False) for name in ("identity", "autocontrast", "equalize")},
    }


@POLICIES.add("trivial_augment")
def trivial_augment(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return TrivialAugment Wide, a function of uint8[H, W, C].

    The operation, the magnitude and the direction are uniform and independent.
    """
    space = wide_space()
    table = np.array([rows(space, name) for name in OPERATIONS])
    table = table.reshape(-1, table.shape[-1])

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        index = jax.random.randint(key, (), 0, len(table), jnp.int32)
        return jnp.moveaxis(operate(jnp.moveaxis(image, -1, 0), drawn(table, index)), 0, -1)

    return apply
