"""Convert images to grayscale at random."""

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.registry import AUGMENTATIONS

PROBABILITY = 0.2
LUMA = (0.2989, 0.587, 0.114)
"""torchvision's weights of red, green and blue."""


def grayscale(key: jax.Array, image: jax.Array) -> jax.Array:
    """With probability 0.2, replace each channel by the weighted mean of all three (as in SimCLR, arXiv:2002.05709).

    The image is normalized, float[H, W, C], with 1 or 3 channels. torchvision computes the mean before normalization.
    The result is the same if all channels have the same mean and standard deviation.
    """
    channels = image.shape[-1]
    if channels not in (1, 3):
        raise InputError(f"grayscale needs images with 1 or 3 channels, and these have {channels}; leave it out")
    if channels == 1:
        return image
    gray = (image * jnp.array(LUMA, image.dtype)).sum(-1, keepdims=True)
    return jnp.where(jax.random.bernoulli(key, jnp.float32(PROBABILITY)), gray, image)


AUGMENTATIONS.add("grayscale")(lambda settings: grayscale)
