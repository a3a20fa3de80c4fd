"""Convert pixels to the network's input, on the device. Augmentation depends only on seed, epoch and row."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxddp.augment.geometry as geometry
from jaxddp.augment.mixing import Mixing, mix
from jaxddp.augment.operations import color_jitter, on_planes
from jaxddp.augment.policies import rand_augment
from jaxddp.config import AugmentConfig, Config
from jaxddp.config.registry import AUGMENTATIONS, POLICIES
from jaxddp.core.errors import InputError, Key, Words, first_line, shaped
from jaxddp.data.batch import Batch

Augmentation = Callable[[jax.Array, jax.Array], jax.Array]
"""A function (key, image [H, W, C]) -> image of the same shape and dtype."""

# Each use of the seed has its own random stream. Initialization uses the seed's key; other uses fold in a constant.
_AUGMENT = 0x696D67
# The augmentations of pixels with a setting of their own, in the order of use.
_OF_PIXELS: dict[str, Callable[[jax.Array, jax.Array, AugmentConfig], jax.Array]] = {
    "flip": lambda key, image, settings: geometry.flip(key, image),
    "pad": geometry.padded_crop,
    "rand_augment": rand_augment,
    "policy": lambda key, image, settings: POLICIES.get(settings.policy or "")(settings)(key, image),
    "color_jitter": lambda key, image, settings: on_planes(partial(color_jitter, key), image, settings.color_jitter),
    "cutout": geometry.cutout,
}
# The augmentations that need 8-bit pixels with 1 or 3 channels, and what to do for other images.
_OF_COLORS = {"rand_augment": "give 0", "policy": "leave it out", "color_jitter": "leave it out"}
# Each use of an example's key has its own random stream. A number is never changed, so that old runs resume.
_MIX, _THEN, _EXTRA = 5, 6, 7
_STREAMS = {"flip": 0, "pad": 1, "rand_augment": 2, "cutout": 3, "erase": 4, "policy": 8, "color_jitter": 9}


class Inputs(NamedTuple):
    """The network's input for a batch."""

    images: jax.Array
    """float[B, H, W, C]."""
    mixing: Mixing | None
    """The partners' labels of mixed images; None if images are not mixed."""

    def __repr__(self) -> str:
        return f"Inputs({shaped(self.images)}{', mixed' if self.mixing is not None else ''})"


@dataclass(frozen=True)
class Preprocess:
    """A function that augments and normalizes the images of a batch.

    The order in training is: resize, if the batch has a `side`; flip or alternate flip, padded crop, RandAugment or a
    policy, color jitter, cutout and the augmentations in `augment.then`, on pixels; normalize; erase; `extra`; mixup or
    cutmix. In evaluation, images are only normalized. The random numbers of an augmentation do not depend on the other
    augmentations.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """The mean of pixel values in 0..1, by channel. Values beyond the number of channels are ignored. A single value
    applies to all channels."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    dtype: Any = jnp.float32
    """The dtype of the result. Normalized images are augmented in float32 or wider."""
    extra: Augmentation | None = None
    """An additional augmentation of normalized images, from a recipe file."""
    view: int = 0
    """The number of a view of each image. The policy of another view has other random numbers."""

    @classmethod
    def of(
        cls, config: Config, augment: AugmentConfig | None = None, extra: Augmentation | None = None
    ) -> "Preprocess":
        """Create a `Preprocess` with the normalization of a config, without augmentation by default."""
        data, dtype = config.data, config.train.precision or "float32"
        return cls(data.mean, data.std, augment or AugmentConfig(), dtype, extra)

    def __call__(self, batch: Batch, *, train: bool, key: jax.Array | None = None) -> Inputs:
        """Preprocess a batch of B images; B must be even if images are mixed.

        Args:
            key: the random key of the run's seed, by default of seed 0; unused in evaluation.
        """
        if not train:
            return Inputs(self._normalize(batch.image).astype(self.dtype), None)
        stream = jax.random.fold_in(jax.random.key(0) if key is None else key, _AUGMENT)

        def key_of(epoch: jax.Array | int, row: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(stream, epoch), row)

        def augmented(epoch: jax.Array, row: jax.Array, image: jax.Array) -> jax.Array:
            if self.augment.alternate_flip:
                image = geometry.alternate_flip(jax.random.fold_in(key_of(0, row), _STREAMS["flip"]), epoch, image)
            return self.augmented(key_of(epoch, row), image)

        pixels = batch.image if batch.side is None else geometry.resized(batch.image, batch.side, self._compute_dtype)
        images, mixing = jax.vmap(augmented)(batch.epoch, batch.row, pixels), None
        mixup, cutmix = self.augment.mixup, self.augment.cutmix
        if mixup or cutmix:
            keys = jax.vmap(lambda epoch, row: jax.random.fold_in(key_of(epoch, row), _MIX))(batch.epoch, batch.row)
            images, mixing = mix(keys, images, batch.label, batch.mask, mixup=mixup, cutmix=cutmix)
        return Inputs(images.astype(self.dtype), mixing)

    def augmented(self, key: jax.Array, image: jax.Array) -> jax.Array:
        """Augment and normalize the pixels of one image [H, W, C], without mixing. Return float[H, W, C].

        Raises: see `check_augmentation`.
        """
        for name, augment in _OF_PIXELS.items():
            if setting := getattr(self.augment, name):
                if name in _OF_COLORS and (image.shape[-1] not in (1, 3) or image.dtype != jnp.uint8):
                    fault = f": needs 8-bit pixels with 1 or 3 channels, and not {jax.typeof(image)}"
                    raise InputError(Key(f"data.augment.{name}", setting), fault, advice=_OF_COLORS[name])
                use = jax.random.fold_in(key, _STREAMS[name])
                if name == "policy" and self.view:
                    use = jax.random.fold_in(use, self.view)
                with jax.numpy_rank_promotion("allow"):
                    image = augment(use, image, self.augment)
        for index, name in enumerate(self.augment.then):
            stream = jax.random.fold_in(jax.random.fold_in(key, _THEN), zlib.crc32(name.encode()))
            use = jax.random.fold_in(stream, self.augment.then[:index].count(name))
            function = AUGMENTATIONS.get(name)(self.augment)
            image = _apply_checked((Key("data.augment.then"), f": {name}"), function, use, image)
        image = self._normalize(image)
        if self.augment.erase:
            image = geometry.erase(jax.random.fold_in(key, _STREAMS["erase"]), image, self.augment)
        if self.extra is not None:
            image = _apply_checked("augmentation", self.extra, jax.random.fold_in(key, _EXTRA), image)
        return image

    @property
    def _compute_dtype(self) -> Any:
        return jnp.promote_types(self.dtype, jnp.float32)

    def _normalize(self, images: jax.Array) -> jax.Array:
        """Compute (pixels / white - mean) / std as one multiplication and one addition, in float32 or wider.

        White, the largest pixel value, is 65535 for uint16 and 255 otherwise. Floats are already normalized.
        """
        if jnp.issubdtype(images.dtype, jnp.floating):
            return images.astype(self._compute_dtype)
        channels, white = images.shape[-1], 65535 if images.dtype == jnp.uint16 else 255
        mean, std = (jnp.array(each[:channels], ndmin=images.ndim) for each in (self.mean, self.std))
        dtype = self._compute_dtype
        return images.astype(dtype) * (1 / (white * std)).astype(dtype) - (mean / std).astype(dtype)


def check_augmentation(preprocess: Preprocess, image_shape: tuple[int, int, int], dtype: Any = jnp.uint8) -> None:
    """Trace the augmentation of one image, (H, W, C), to find errors before a run is compiled.

    Raises:
        InputError: settings conflict or are invalid for the image, or an augmentation fails or changes shape or dtype.
    """
    augment = preprocess.augment
    if augment.alternate_flip and augment.flip:
        fault = ": flip and alternate_flip are both set"
        raise InputError(Key("data.augment"), fault, advice="set one of them to false")
    if augment.policy and augment.rand_augment:
        policy, rand = (Key(f"data.augment.{key}", getattr(augment, key)) for key in ("policy", "rand_augment"))
        raise InputError(policy, " with ", rand, ": an image is changed by one policy only", advice="set one of them")
    if augment.color_jitter and augment.color_jitter[3] > 0.5:
        fault = ": the strength of the hue, the last number, is at most 0.5, which is half a turn"
        raise InputError(Key("data.augment.color_jitter", augment.color_jitter), fault, advice="give 0.5 for any hue")
    image = jax.ShapeDtypeStruct(image_shape, dtype)
    jax.eval_shape(lambda image: preprocess.augmented(jax.random.key(0), image), image)


def _apply_checked(origin: Words, function: Augmentation, key: jax.Array, image: jax.Array) -> jax.Array:
    try:
        result = jnp.asarray(function(key, image))
    except InputError:
        raise
    except Exception as error:
        fault = f": failed for an image {jax.typeof(image)} ({type(error).__name__}: {first_line(error)})"
        raise InputError(origin, fault, advice="give a function (key, image) -> image that JAX can trace") from error
    if (result.shape, result.dtype) != (image.shape, image.dtype):
        fault = f": returned {jax.typeof(result)} for an image {jax.typeof(image)}"
        raise InputError(origin, fault, advice="return the same shape and dtype")
    return result
