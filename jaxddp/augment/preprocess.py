"""From pixels to the network's input, on the device; whatever is random is a function of (seed, epoch, row)."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.augment.flip import alternate_flip
from jaxddp.augment.mixing import Mixing, mix
from jaxddp.augment.resize import resized
from jaxddp.config import AugmentConfig, Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Words
from jaxddp.core.wording import first_line, shaped
from jaxddp.data.batch import Batch
from jaxddp.registry import AUGMENTATIONS

Augmentation = Callable[[jax.Array, jax.Array], jax.Array]
"""(key, image [H, W, C]) -> image of the same shape and dtype."""

# One stream of random numbers per use of a seed: initialization takes the seed itself, others fold a word of theirs.
_AUGMENT = 0x696D67
# The augmentations that have a setting, of pixels and of normalized images, in their order.
_OF_PIXELS, _OF_NORMALIZED = ("flip", "pad", "rand_augment", "cutout"), ("erase",)
# And one stream per use of an example's key.
*_SET, _MIX, _THEN, _EXTRA = range(8)
_STREAMS = dict(zip(_OF_PIXELS + _OF_NORMALIZED, _SET, strict=True))


class Inputs(NamedTuple):
    """What the network is given for a batch."""

    images: jax.Array
    """float[B, H, W, C]."""
    mixing: Mixing | None
    """The labels of mixed images; None where each image has only its own."""

    def __repr__(self) -> str:
        return f"Inputs({shaped(self.images)}{', mixed' if self.mixing is not None else ''})"


@dataclass(frozen=True)
class Preprocess:
    """Augment and normalize.

    In training, in this order: resize, where the batch says so; flip or alternate flip, padded crop, RandAugment,
    cutout (on pixels); normalize; erase (zeros are the mean colour here); the augmentations that `augment.then` names;
    `extra`; mixup or cutmix. In evaluation, normalize alone. What one of them draws does not depend on which others
    there are.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Per channel, of pixel values in 0..1; of more values than channels the first are taken, and one is for all."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    dtype: Any = jnp.float32
    """Of the result; after the pixels everything is computed in float32 or wider."""
    extra: Augmentation | None = None
    """A further augmentation of normalized images, a recipe file's own."""

    @classmethod
    def of(
        cls, config: Config, augment: AugmentConfig | None = None, extra: Augmentation | None = None
    ) -> "Preprocess":
        """Normalization as a config says, and what is given beside it: nothing is what evaluation needs."""
        data, dtype = config.data, config.train.precision or "float32"
        return cls(data.mean, data.std, augment or AugmentConfig(), dtype, extra)

    def __call__(self, batch: Batch, *, train: bool, key: jax.Array | None = None) -> Inputs:
        """The images in this instance's dtype, for a batch of images [B, H, W, C]; B even where any are mixed.

        `key` is that of the run's seed; of seed 0 where there is none. Evaluation draws nothing.
        """
        if not train:
            return Inputs(self._normalize(batch.image).astype(self.dtype), None)
        stream = jax.random.fold_in(jax.random.key(0) if key is None else key, _AUGMENT)

        def key_of(epoch: jax.Array | int, row: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(stream, epoch), row)

        def augmented(epoch: jax.Array, row: jax.Array, image: jax.Array) -> jax.Array:
            if self.augment.alternate_flip:
                first = jax.random.fold_in(key_of(0, row), _STREAMS["flip"])
                image = alternate_flip(first, epoch, image)
            return self.augmented(key_of(epoch, row), image)

        pixels = batch.image if batch.side is None else resized(batch.image, batch.side, self._wide)
        images, mixing = jax.vmap(augmented)(batch.epoch, batch.row, pixels), None
        if self.augment.mixup or self.augment.cutmix:
            keys = jax.vmap(lambda epoch, row: jax.random.fold_in(key_of(epoch, row), _MIX))(batch.epoch, batch.row)
            images, mixing = mix(
                keys, images, batch.label, batch.mask, mixup=self.augment.mixup, cutmix=self.augment.cutmix
            )
        return Inputs(images.astype(self.dtype), mixing)

    def augmented(self, key: jax.Array, image: jax.Array) -> jax.Array:
        """One image [H, W, C] of pixels, before any is mixed: float[H, W, C]. Raises: as `check_augmentation`."""
        image = self._normalize(self._set(_OF_PIXELS, key, image))
        image = self._set(_OF_NORMALIZED, key, image)
        names = self.augment.then
        for place, name in enumerate(names):
            stream = jax.random.fold_in(jax.random.fold_in(key, _THEN), zlib.crc32(name.encode()))
            own = jax.random.fold_in(stream, names[:place].count(name))
            image = _checked((Key("data.augment.then"), f": {name}"), AUGMENTATIONS.get(name)(self.augment), own, image)
        if self.extra is not None:
            image = _checked("augmentation", self.extra, jax.random.fold_in(key, _EXTRA), image)
        return image

    def _set(self, names: tuple[str, ...], key: jax.Array, image: jax.Array) -> jax.Array:
        """Those of the named augmentations whose setting is not 0."""
        for name in names:
            if getattr(self.augment, name):
                image = AUGMENTATIONS.get(name)(self.augment)(jax.random.fold_in(key, _STREAMS[name]), image)
        return image

    @property
    def _wide(self) -> Any:
        return jnp.promote_types(self.dtype, jnp.float32)

    def _normalize(self, images: jax.Array) -> jax.Array:
        """(pixels / white - mean) / std, as one multiplication and one addition; float32, or float64 where asked for.

        White is 65535 in uint16, and else 255.
        """
        channels, white = images.shape[-1], 65535 if images.dtype == jnp.uint16 else 255
        mean, std = jnp.array(self.mean[:channels]), jnp.array(self.std[:channels])
        wide = self._wide
        return images.astype(wide) * (1 / (white * std)).astype(wide) - (mean / std).astype(wide)


def check_augmentation(preprocess: Preprocess, image_shape: tuple[int, int, int], dtype: Any = jnp.uint8) -> None:
    """Trace the augmentation of one image, (H, W, C), so that errors in it are found before a run is compiled."""
    augment = preprocess.augment
    if augment.alternate_flip and (augment.flip or "flip" in augment.then):
        both = "flip and alternate_flip are both set"
        raise InputError(Key("data.augment"), f": {both}", advice="set one of them to false")
    image = jax.ShapeDtypeStruct(image_shape, dtype)
    jax.eval_shape(lambda image: preprocess.augmented(jax.random.key(0), image), image)


def _checked(origin: Words, function: Augmentation, key: jax.Array, image: jax.Array) -> jax.Array:
    try:
        found = jnp.asarray(function(key, image))
    except InputError:
        raise
    except Exception as error:
        what = first_line(error)
        raise InputError(
            *(origin, f": failed on an image {jax.typeof(image)} ({type(error).__name__}: {what})"),
            advice="give a function (key, image) -> image that JAX can trace",
        ) from error
    if (found.shape, found.dtype) != (image.shape, image.dtype):
        raise InputError(
            *(origin, f": made {jax.typeof(found)} of an image {jax.typeof(image)}"),
            advice="return one of this shape and dtype",
        )
    return found
