"""3-Augment: grayscale, solarize or blur, and then color jitter (Touvron et al. 2022, arXiv:2204.07118)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.color import blur, box_weights, color_jitter
from jaxddp.augment.operations import gray_of
from jaxddp.config import AugmentConfig
from jaxddp.config.registry import POLICIES
from jaxddp.core.errors import InputError, Key

JITTER = (0.3, 0.3, 0.3, 0.0)
THRESHOLD = 128
RADII = tuple(radius / 100 for radius in range(10, 201))
"""The radii of the blur in pixels: 0.10, 0.11, …, 2.00. The authors draw from the interval of the same bounds."""


@POLICIES.add("three_augment")
def three_augment(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return 3-Augment, a function of uint8[H, W, C].

    Grayscale, solarize (threshold 128) and Gaussian blur are equally likely. Color jitter has strength 0.3 for
    brightness, contrast and saturation.

    Raises:
        InputError: the config has further color jitter.
    """
    if settings.color_jitter:
        raise InputError(
            Key("data.augment.color_jitter", settings.color_jitter),
            ": ",
            Key.plain("data.augment.policy", "three_augment"),
            " has color jitter of its own",
            advice="set one of them",
        )
    table = np.array([box_weights(radius) for radius in RADII], np.uint32)

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        choice_key, radius_key, jitter_key = jax.random.split(key, 3)
        choice = jax.random.randint(choice_key, (), 0, 3, jnp.int32)
        radius = jax.random.randint(radius_key, (), 0, len(RADII), jnp.int32)
        changed = one_of_three(jnp.moveaxis(image, -1, 0), choice, jnp.array(table)[radius])
        return jnp.moveaxis(color_jitter(jitter_key, changed, JITTER), 0, -1)

    return apply


def one_of_three(planes: jax.Array, choice: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the gray (`choice` 0), solarized (1) or blurred (2) image of uint8[C, H, W].

    Args:
        choice: int32[].
        weights: the weights of the blur, uint32[3]; see `jaxddp.augment.color.box_weights`.
    """
    gray = jnp.broadcast_to(gray_of(planes.astype(jnp.int32)), planes.shape).astype(planes.dtype)
    solarized = jnp.where(planes < THRESHOLD, planes, 255 - planes)
    return jnp.select([choice == 0, choice == 1], [gray, solarized], blur(planes, weights))
