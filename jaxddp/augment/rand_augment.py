"""RandAugment: random operations with one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

The ranges are those of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501). At magnitude 0 an operation has no effect. At
the largest magnitude the parameters are: rotate 30 degrees, shear 0.3, translate 150/331 of the side, solarize
threshold 0 (from 256), posterize 4 bits (from 8), blend factor 0.9 away from 1. Results equal Pillow's (ImageOps,
ImageEnhance, nearest neighbour), except that a blend is rounded instead of truncated.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxddp.augment.ops.apply as ops
from jaxddp.augment.ops.pixel_operation import ONE, OPERATIONS, check_pixels, matching
from jaxddp.config import AugmentConfig
from jaxddp.core.message import Key
from jaxddp.registry import AUGMENTATIONS

LARGEST = 10


class Drawn(NamedTuple):
    """The operation that was drawn, with its direction and magnitude; see `PixelOperation`."""

    operation: jax.Array
    """int32[], the index in OPERATIONS."""
    sign: jax.Array
    """int32[], 1 or -1: the direction of a warp, or a blend away from (1) or towards (-1) the degenerate image."""
    share: float
    """The magnitude as a fraction of `LARGEST`, 0 to 1."""

    def matches(self, *names: str) -> list[jax.Array]:
        return matching(self.operation, names)

    @property
    def cos(self) -> jax.Array:
        return jnp.where(self.matches("rotate")[0], round(ONE * math.cos(self._angle)), ONE)

    @property
    def sin(self) -> jax.Array:
        return self._signed("rotate", ONE * math.sin(self._angle))

    @property
    def shear_x(self) -> jax.Array:
        return self._signed("shear_x", ONE * 0.3 * self.share)

    @property
    def shear_y(self) -> jax.Array:
        return self._signed("shear_y", ONE * 0.3 * self.share)

    def shift_x(self, width: int) -> jax.Array:
        return self._signed("translate_x", 150 / 331 * width * self.share)

    def shift_y(self, height: int) -> jax.Array:
        return self._signed("translate_y", 150 / 331 * height * self.share)

    @property
    def threshold(self) -> int:
        return round(256 * (1 - self.share))

    @property
    def dropped(self) -> int:
        return round(4 * self.share)

    @property
    def factor(self) -> jax.Array:
        return ONE + self.sign * round(ONE * 0.9 * self.share)

    @property
    def _angle(self) -> float:
        return math.radians(30 * self.share)

    def _signed(self, name: str, amount: float) -> jax.Array:
        """Return the rounded amount times `sign`, int32[], or 0 if another operation than `name` was drawn."""
        return jnp.where(self.matches(name)[0], self.sign * round(amount), 0)


@AUGMENTATIONS.add("rand_augment")
def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return RandAugment with the config's layers and magnitude; see `rand_augment`."""
    layers, magnitude = settings.rand_augment, settings.rand_magnitude

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        check_pixels("rand_augment", Key("data.augment.rand_augment", layers), image, advice="give 0")
        return rand_augment(key, image, layers, magnitude)

    return apply


def rand_augment(key: jax.Array, image: jax.Array, layers: int, magnitude: float) -> jax.Array:
    """Apply `layers` random operations to uint8[H, W, C], each uniform among `OPERATIONS`, in a random direction."""
    operation_key, sign_key = jax.random.split(key)
    operations = jax.random.randint(operation_key, (layers,), 0, len(OPERATIONS), jnp.int32)
    signs = jax.random.rademacher(sign_key, (layers,), jnp.int32)

    def layer(planes: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return ops.operate(planes, Drawn(*drawn, magnitude / LARGEST)), None

    # The layers run in a loop, so the compile time does not grow with their number.
    return jnp.moveaxis(jax.lax.scan(layer, jnp.moveaxis(image, -1, 0), (operations, signs))[0], 0, -1)


def operate(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Apply one operation to one image, uint8[H, W, C]; C is 1 or 3."""
    return jnp.moveaxis(ops.operate(jnp.moveaxis(image, -1, 0), drawn), 0, -1)
