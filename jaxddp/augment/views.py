"""Test-time augmentation: average an image's logits over several views."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxddp.config import Views


def mean_logits(classify: Callable[[jax.Array], jax.Array], images: jax.Array, views: Views) -> jax.Array:
    """Return the mean logits, float[B, K] in float32 or wider, over views of normalized images [B, H, W, C].

    Args:
        classify: a function of images that returns logits.
        views: "one" is the image alone. "mirror" is the image and its mirror image, with equal weights.
            "mirror_translate" (Jordan 2024, arXiv:2404.00498) adds four views: the image translated by one pixel down
            and right, the image translated by one pixel up and left, and the mirror images of both. The border is
            reflected. The four added views have half of the total weight.
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
