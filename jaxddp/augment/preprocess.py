"""From uint8 pixels to the network's input, on the device; whatever is random is a function of (seed, epoch, row)."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.augment.erasing import cutout, erase
from jaxddp.augment.mixing import Mixing, mix
from jaxddp.augment.rand_augment import rand_augment
from jaxddp.config import AugmentConfig
from jaxddp.data.batch import Batch

# One stream of random numbers per use of a seed: initialization takes the seed itself, others fold a word of theirs.
_AUGMENT = 0x696D67
# And one per use of an example's key.
_FLIP, _CROP, _RAND_AUGMENT, _CUTOUT, _ERASE, _MIX = range(6)


class Inputs(NamedTuple):
    """What the network is given for a batch."""

    images: jax.Array
    """float[B, H, W, C]."""
    mixing: Mixing | None
    """Which labels the images have, and how much of each; None where an image has but its own."""


@dataclass(frozen=True)
class Preprocess:
    """Augment and normalize.

    In training, in this order: flip, padded crop, RandAugment, cutout (on uint8 pixels); normalize; erase (zeros are
    the mean colour here); mixup or cutmix. In evaluation, normalize alone.

    Attributes:
        mean, std: per channel, of pixel values in 0..1; grayscale images take the first of them.
        dtype: of the result; all that comes after the uint8 pixels is computed in float32 or wider.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    seed: int = 0
    dtype: Any = jnp.float32

    def __call__(self, batch: Batch, *, train: bool) -> Inputs:
        """The images in this instance's dtype, for a batch of uint8[B, H, W, C] images; B even where any are mixed."""
        if not train:
            return Inputs(self._normalize(batch.image).astype(self.dtype), None)
        keys = jax.vmap(self._key)(batch.epoch, batch.row)
        images, mixing = jax.vmap(self._augment)(keys, batch.image), None
        if self.augment.mixup or self.augment.cutmix:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, _MIX))(keys)
            alphas = {"mixup": self.augment.mixup, "cutmix": self.augment.cutmix}
            images, mixing = mix(keys, images, batch.label, batch.mask, **alphas)
        return Inputs(images.astype(self.dtype), mixing)

    def _key(self, epoch: jax.Array, row: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self.seed), _AUGMENT)
        return jax.random.fold_in(jax.random.fold_in(key, epoch), row)

    def _augment(self, key: jax.Array, image: jax.Array) -> jax.Array:
        """One image, uint8[H, W, C], as far as it does not depend on others: float[H, W, C]."""
        settings = self.augment
        if settings.flip:
            image = flip(jax.random.fold_in(key, _FLIP), image)
        if settings.pad:
            image = padded_crop(jax.random.fold_in(key, _CROP), image, settings.pad)
        if settings.rand_augment:
            key_of_all = jax.random.fold_in(key, _RAND_AUGMENT)
            image = rand_augment(key_of_all, image, settings.rand_augment, settings.rand_magnitude)
        if settings.cutout:
            image = cutout(jax.random.fold_in(key, _CUTOUT), image, settings.cutout)
        image = self._normalize(image)
        if settings.erase:
            image = erase(jax.random.fold_in(key, _ERASE), image, settings.erase)
        return image

    def _normalize(self, images: jax.Array) -> jax.Array:
        """(pixels / 255 - mean) / std, as one multiplication and one addition; float32, or float64 where asked for."""
        channels = images.shape[-1]
        mean, std = jnp.array(self.mean[:channels]), jnp.array(self.std[:channels])
        wide = jnp.promote_types(self.dtype, jnp.float32)
        return images.astype(wide) * (1 / (255 * std)).astype(wide) - (mean / std).astype(wide)


def flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Mirrored left to right, or not, with equal chance: [H, W, C]."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def padded_crop(key: jax.Array, image: jax.Array, pad: int) -> jax.Array:
    """Cut at random from a copy with `pad` black pixels around it: [H, W, C]."""
    top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)
