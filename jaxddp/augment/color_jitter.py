"""Color jitter: change brightness, contrast, saturation and hue at random, in a random order, as torchvision does."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxddp.augment.ops.blend import blended, gray_of, mean_of
from jaxddp.augment.ops.hue import TURN, rotate_hue
from jaxddp.augment.ops.pixel_operation import ONE, check_pixels
from jaxddp.config import AugmentConfig
from jaxddp.core.errors import InputError, Key

Strengths = tuple[float, float, float, float]
"""The strengths of brightness, contrast and saturation, 0 to 1, and of hue, 0 to 0.5; 0 for none."""


def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return color jitter with the config's strengths; see `color_jitter`.

    Raises:
        InputError: the strength of the hue is above 0.5.
    """
    strengths = settings.color_jitter or (0.0, 0.0, 0.0, 0.0)
    setting = Key("data.augment.color_jitter", settings.color_jitter)
    if strengths[3] > 0.5:
        raise InputError(
            setting,
            ": the strength of the hue, the last number, is at most 0.5, which is half a turn",
            advice="give 0.5 for any hue",
        )

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        check_pixels(setting, image, advice="leave it out")
        return jnp.moveaxis(color_jitter(key, jnp.moveaxis(image, -1, 0), strengths), 0, -1)

    return apply


def color_jitter(key: jax.Array, planes: jax.Array, strengths: Strengths) -> jax.Array:
    """Change uint8[C, H, W] in a random order of the steps whose strength is not 0.

    The factors of brightness, contrast and saturation are uniform in 1 - strength to 1 + strength. The hue is rotated
    by up to `strengths[3]` turns in both directions. Each step rounds to whole levels. Saturation and hue do nothing to
    gray images.
    """
    usable = strengths if len(planes) == 3 else strengths[:2]
    steps = [index for index, strength in enumerate(usable) if strength > 0]
    if not steps:
        return planes
    order, amounts = draw(key, strengths, steps)

    def step(planes: jax.Array, which: jax.Array) -> tuple[jax.Array, None]:
        return adjusted(planes, which, amounts[which], has_hue=3 in steps), None

    return jax.lax.scan(step, planes, order)[0]


def draw(key: jax.Array, strengths: Strengths, steps: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return a random order of the steps, int32[n], and the amount of each of the four steps, int32[4].

    The amounts are those of `adjusted`. They are drawn as whole numbers, which are the same on any device.
    """
    order_key, amount_key = jax.random.split(key)
    reach = [round((TURN if index == 3 else ONE) * strength) for index, strength in enumerate(strengths)]
    bounds = jnp.array(reach, jnp.int32)
    amounts = jax.random.randint(amount_key, (4,), -bounds, bounds + 1, jnp.int32)
    return jax.random.permutation(order_key, jnp.array(steps, jnp.int32)), amounts


def adjusted(planes: jax.Array, which: jax.Array, amount: jax.Array, *, has_hue: bool = True) -> jax.Array:
    """Change one property of uint8[C, H, W].

    Args:
        which: int32[], 0 for brightness, 1 for contrast, 2 for saturation, 3 for hue.
        amount: int32[], the distance of the factor from 1, in units of 1/`ONE`; of the hue, in units of 1/`TURN` turn.
        has_hue: whether `which` may be 3.
    """
    pixels = planes.astype(jnp.int32)
    gray = gray_of(pixels)
    degenerates = [jnp.zeros_like(pixels), *(jnp.broadcast_to(each, pixels.shape) for each in (mean_of(gray), gray))]
    mixed = blended(pixels, jnp.select([which == index for index in range(3)], degenerates, pixels), ONE + amount)
    if has_hue:
        mixed = jnp.where(which == 3, rotate_hue(pixels, jnp.where(which == 3, amount, 0)), mixed)
    return mixed.astype(planes.dtype)
