"""Parts of an image are taken away: cutout and random erasing, of one image with its key."""

import jax
import jax.numpy as jnp

from jaxddp.augment.box import Box, centered

AREA = (0.02, 0.4)
ASPECT = (0.3, 1 / 0.3)
TRIES = 10


def cutout(key: jax.Array, image: jax.Array, side: int) -> jax.Array:
    """A black square, cut off at the borders (DeVries & Taylor 2017, arXiv:1708.04552).

    Args:
        image: uint8[H, W, C].
        side: of the square, in pixels. Its centre is any pixel of the image with equal chance.
    """
    height, width, _ = image.shape
    square = centered(key, height, width, jnp.int32(side), jnp.int32(side))
    return jnp.where(square.mask(height, width)[..., None], 0, image).astype(image.dtype)


def erase(key: jax.Array, image: jax.Array, probability: float) -> jax.Array:
    """A random rectangle of a normalized image set to zero, which is the data's mean colour.

    Zhong et al. 2017 (arXiv:1708.04896) fill each pixel at random by default; the mean is their variant RE-M and what
    torchvision's recipes use. It takes no random numbers for pixels that are seldom used.

    Args:
        image: float[H, W, C].
        probability: that there is a rectangle at all.
    """
    height, width, _ = image.shape
    whether, where = jax.random.split(key)
    hit = jax.random.bernoulli(whether, jnp.float32(probability))
    return jnp.where(hit & erased_box(where, height, width).mask(height, width)[..., None], 0, image)


def erased_box(key: jax.Array, image_height: int, image_width: int) -> Box:
    """The rectangle that random erasing takes away: in the image as a whole, or empty.

    Its share of the area is uniform in `AREA`, its height / width log-uniform in `ASPECT` (the paper's bounds, drawn so
    that lying and standing rectangles are equally likely), its place uniform among those where it fits. The first of
    `TRIES` draws that fits is taken.
    """
    area, aspect, top, left = jax.random.uniform(key, (4, TRIES), jnp.float32)
    area = (AREA[0] + area * (AREA[1] - AREA[0])) * (image_height * image_width)
    low, high = jnp.log(jnp.array(ASPECT, jnp.float32))
    aspect = jnp.exp(low + aspect * (high - low))
    height = jnp.round(jnp.sqrt(area * aspect)).astype(jnp.int32)
    width = jnp.round(jnp.sqrt(area / aspect)).astype(jnp.int32)
    fits = (height >= 1) & (height <= image_height) & (width >= 1) & (width <= image_width)
    # Rounding can bring a product up to the next whole place, one past the last.
    top = jnp.minimum((top * (image_height - height + 1)).astype(jnp.int32), image_height - height)
    left = jnp.minimum((left * (image_width - width + 1)).astype(jnp.int32), image_width - width)
    first = jnp.argmax(fits)
    size = jnp.where(fits[first], jnp.stack([height, width])[:, first], 0)
    return Box(top[first], left[first], size[0], size[1])
