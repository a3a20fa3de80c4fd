"""Convert images to grayscale at random."""

import jax
import jax.numpy as jnp

from jaxddp.augment.ops.blend import gray_of
from jaxddp.core.errors import InputError
from jaxddp.registry import AUGMENTATIONS

PROBABILITY = 0.2


def grayscale(key: jax.Array, image: jax.Array) -> jax.Array:
    """With probability 0.2, replace each channel by the gray of all three (as in SimCLR, arXiv:2002.05709).

    The image has pixels uint8 or uint16 [H, W, C], with 1 or 3 channels. Gray is that of Pillow and torchvision.

    Raises:
        InputError: the image has other channels, or is normalized.
    """
    channels = image.shape[-1]
    if channels not in (1, 3):
        raise InputError(f"grayscale needs images with 1 or 3 channels, and these have {channels}; leave it out")
    if jnp.issubdtype(image.dtype, jnp.floating):
        raise InputError("grayscale needs pixels, and the images are already normalized; leave it out")
    gray = jnp.moveaxis(gray_of(jnp.moveaxis(image, -1, 0).astype(jnp.uint32)), 0, -1).astype(image.dtype)
    return jnp.where(jax.random.bernoulli(key, jnp.float32(PROBABILITY)), gray, image)


AUGMENTATIONS.add("grayscale")(lambda settings: grayscale)
