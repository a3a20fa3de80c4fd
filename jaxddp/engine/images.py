"""From uint8 pixels to the network's input, on the device; whatever is random is a function of (seed, epoch, row)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.data.batch import Batch

# One stream of random numbers per use of a seed: initialization takes the seed itself, others fold a word of theirs.
_AUGMENT = 0x696D67


@dataclass(frozen=True)
class Preprocess:
    """Flip, padded crop, and normalize.

    Attributes:
        mean, std: per channel, of pixel values in 0..1; grayscale images take the first of them.
        flip: mirror half of the training images, left to right.
        pad: cut each training image at random from its copy with this many black pixels around it.
        dtype: of the result.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    flip: bool = True
    pad: int = 0
    seed: int = 0
    dtype: Any = jnp.float32

    def __call__(self, batch: Batch, *, train: bool) -> jax.Array:
        """float[B, H, W, C] of this instance's dtype, for a batch of uint8[B, H, W, C] images."""
        images = batch.image
        if train and (self.flip or self.pad):
            keys = jax.vmap(self._key)(batch.epoch, batch.row)
            images = jax.vmap(self._augment)(keys, images)
        return self.normalize(images)

    def normalize(self, images: jax.Array) -> jax.Array:
        """(pixels / 255 - mean) / std, as one multiplication and one addition."""
        channels = images.shape[-1]
        mean, std = jnp.array(self.mean[:channels]), jnp.array(self.std[:channels])
        wide = jnp.promote_types(self.dtype, jnp.float32)
        return (images.astype(wide) * (1 / (255 * std)).astype(wide) - (mean / std).astype(wide)).astype(self.dtype)

    def _key(self, epoch: jax.Array, row: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self.seed), _AUGMENT)
        return jax.random.fold_in(jax.random.fold_in(key, epoch), row)

    def _augment(self, key: jax.Array, image: jax.Array) -> jax.Array:
        flip_key, crop_key = jax.random.split(key)
        if self.flip:
            image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        if self.pad:
            top, left = jax.random.randint(crop_key, (2,), 0, 2 * self.pad + 1)
            padded = jnp.pad(image, ((self.pad, self.pad), (self.pad, self.pad), (0, 0)))
            image = jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)
        return image
