"""AugMix: a mixture of an image with chains of operations on it (Hendrycks et al. 2020, arXiv:1912.02781)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.operations import IDENTITY, PixelOperation, Size, Space, drawn, operate_all, rows
from jaxddp.config import AugmentConfig
from jaxddp.config.registry import POLICIES

WIDTH, DEEPEST, SEVERITY = 3, 3, 3
"""The number of chains, the largest number of operations of a chain, and the number of magnitudes that are drawn."""
BINS = 10
UNIT = 1 << 12
"""Weights are multiples of 1/4,096, so the mixture is exact in 32-bit integers."""


def mixing_space(size: Size) -> dict[str, Space]:
    """Return the first three of torchvision's 10 magnitudes of each operation of the paper.

    The paper leaves out the operations that resemble the corruptions of ImageNet-C: brightness, color, contrast and
    sharpness.
    """
    steps = np.arange(SEVERITY) / (BINS - 1)
    height, width = size
    return {
        **{name: Space(np.zeros(SEVERITY), False) for name in ("autocontrast", "equalize")},
        "posterize": Space(4 - np.round(4 * steps), False),
        "rotate": Space(30 * steps, True),
        "solarize": Space(255 - 255 * steps, False),
        "shear_x": Space(0.3 * steps, True),
        "shear_y": Space(0.3 * steps, True),
        "translate_x": Space(width / 3 * steps, True),
        "translate_y": Space(height / 3 * steps, True),
    }


@POLICIES.add("augmix")
def augmix(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return AugMix, a function of uint8[H, W, C].

    Each of three chains applies 1 to 3 operations. Dirichlet(1, 1, 1) gives the weights of the chains, and Beta(1, 1)
    the weight of their mixture against the image. The authors mix normalized images, which is the same but for the
    rounding of the mixture to a whole level.
    """

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        height, width, _ = image.shape
        chain_key, weight_key = jax.random.split(key)
        chains = draw_chains(chain_key, (height, width))
        mixed = mixture(jnp.moveaxis(image, -1, 0), chains, draw_weights(weight_key))
        return jnp.moveaxis(mixed, 0, -1)

    return apply


def draw_chains(key: jax.Array, size: Size) -> PixelOperation:
    """Draw the operations of all chains, int32[WIDTH, DEEPEST] each. The identity follows the end of a chain."""
    space = mixing_space(size)
    table = np.array([rows(space, name) for name in space])
    table = table.reshape(-1, table.shape[-1])
    operation_key, depth_key = jax.random.split(key)
    index = jax.random.randint(operation_key, (WIDTH, DEEPEST), 0, len(table), jnp.int32)
    depth = jax.random.randint(depth_key, (WIDTH, 1), 1, DEEPEST + 1, jnp.int32)
    index = jnp.where(jnp.arange(DEEPEST) < depth, index, len(table))
    return drawn(np.concatenate([table, [IDENTITY]]), index)


def draw_weights(key: jax.Array) -> jax.Array:
    """Draw the weights of the image and of the chains, uint32[1 + WIDTH], in units of 1/`UNIT`**2. Their sum is 1.

    The differences of sorted uniform numbers have the distribution Dirichlet(1, …, 1). Beta(1, 1) is uniform.
    """
    cuts = jax.random.randint(key, (WIDTH,), 0, UNIT + 1, jnp.int32)
    share, ends = cuts[0], jnp.sort(cuts[1:])
    of_chains = jnp.diff(ends, prepend=0, append=UNIT)
    return jnp.concatenate([(UNIT - share)[None] * UNIT, share * of_chains]).astype(jnp.uint32)


def mixture(planes: jax.Array, chains: PixelOperation, weights: jax.Array) -> jax.Array:
    """Return the weighted mean of uint8[C, H, W] and of the results of chains of operations, rounded.

    Args:
        chains: int32[WIDTH, DEEPEST] each.
        weights: uint32[1 + WIDTH]; see `draw_weights`.
    """

    def add(total: jax.Array, chain: tuple[PixelOperation, jax.Array]) -> tuple[jax.Array, None]:
        parameters, weight = chain
        return total + weight * operate_all(planes, parameters).astype(jnp.uint32), None

    # The largest sum is 255.5 * 2**24, which fits into 32 bits.
    total, _ = jax.lax.scan(add, weights[0] * planes.astype(jnp.uint32), (chains, weights[1:]))
    return ((total + UNIT**2 // 2) // UNIT**2).astype(planes.dtype)
