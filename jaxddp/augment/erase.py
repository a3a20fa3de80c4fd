"""Fill a random part of an image: cutout fills a square with black, random erasing a rectangle with a mean or noise."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxddp.augment.box import Box, centered, check_side
from jaxddp.config import AugmentConfig

ASPECT = (0.3, 1 / 0.3)
TRIES = 10


def cutout_from(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return cutout (DeVries & Taylor 2017, arXiv:1708.04552): a function that sets a square of an image to 0.

    The side of the square is `settings.cutout`. Its centre is uniform over the pixels of the image, uint8[H, W, C]. The
    authors set normalized images to 0, the mean colour.
    """

    def cutout(key: jax.Array, image: jax.Array) -> jax.Array:
        check_side("cutout", settings.cutout, image)
        height, width, _ = image.shape
        side = jnp.int32(settings.cutout)
        square = centered(key, height, width, side, side)
        return jnp.where(square.mask(height, width)[..., None], 0, image).astype(image.dtype)

    return cutout


def erase_from(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return random erasing: a function that fills a rectangle of a normalized image, float[H, W, C].

    An image is erased with probability `settings.erase`. The fill "mean" is 0, the mean colour, as in torchvision's
    recipes (RE-M of Zhong et al. 2017, arXiv:1708.04896). "noise" draws each value from the standard normal
    distribution, as timm's mode "pixel" does.
    """

    def erase(key: jax.Array, image: jax.Array) -> jax.Array:
        height, width, _ = image.shape
        hit_key, box_key, fill_key = jax.random.split(key, 3)
        is_erased = jax.random.bernoulli(hit_key, jnp.float32(settings.erase))
        is_noise = settings.erase_fill == "noise"
        fill = jax.random.normal(fill_key, image.shape, image.dtype) if is_noise else 0
        box = erasing_box(box_key, height, width, settings.erase_area)
        return jnp.where(is_erased & box.mask(height, width)[..., None], fill, image)

    return erase


def erasing_box(key: jax.Array, image_height: int, image_width: int, bounds: tuple[float, float]) -> Box:
    """Draw the rectangle of random erasing. It is completely inside the image, or empty.

    Its share of the area is uniform in `bounds`, its aspect ratio (height / width) log-uniform in `ASPECT`, and its
    position uniform. Wide and tall rectangles are equally likely. The first of `TRIES` draws that fits the image is
    used.
    """
    area, aspect, top, left = jax.random.uniform(key, (4, TRIES), jnp.float32)
    area = (bounds[0] + area * (bounds[1] - bounds[0])) * (image_height * image_width)
    low, high = jnp.log(jnp.array(ASPECT, jnp.float32))
    aspect = jnp.exp(low + aspect * (high - low))
    height = jnp.round(jnp.sqrt(area * aspect)).astype(jnp.int32)
    width = jnp.round(jnp.sqrt(area / aspect)).astype(jnp.int32)
    fits = (height >= 1) & (height <= image_height) & (width >= 1) & (width <= image_width)
    # The product can be rounded up to one more than the last position.
    top = jnp.minimum((top * (image_height - height + 1)).astype(jnp.int32), image_height - height)
    left = jnp.minimum((left * (image_width - width + 1)).astype(jnp.int32), image_width - width)
    first = jnp.argmax(fits)
    size = jnp.where(fits[first], jnp.stack([height, width])[:, first], 0)
    return Box(top[first], left[first], size[0], size[1])
