"""Test-time augmentation: an image is classified by the mean of its logits over several views."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxddp.config import Views


def mean_logits(classify: Callable[[jax.Array], jax.Array], images: jax.Array, views: Views) -> jax.Array:
    """float[B, K] of normalized images [B, H, W, C].

    "one" is the image as it is. "mirror" is it and its mirror image, half each. "mirror_translate" (Jordan 2024,
    arXiv:2404.00498) adds both of each of two copies that are translated by a pixel, one up and left and one down and
    right, with a border that reflects the image; the copies weigh half of the whole. Means are in float32 at least.
    """
    if views == "one":
        return classify(images)

    def wide(view: jax.Array) -> jax.Array:
        logits = classify(view)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    return functools.reduce(jnp.add, (weight * wide(view) for weight, view in _weighted(images, views)))


def _weighted(images: jax.Array, views: Views) -> Iterator[tuple[float, jax.Array]]:
    copies = [(1.0, images)] if views == "mirror" else [(0.5, images), *((0.25, copy) for copy in _translated(images))]
    for weight, copy in copies:
        yield weight / 2, copy
        yield weight / 2, copy[:, :, ::-1]


def _translated(images: jax.Array) -> tuple[jax.Array, jax.Array]:
    height, width = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    return padded[:, :height, :width], padded[:, 2:, 2:]
