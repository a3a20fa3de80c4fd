"""Mix the images and labels of pairs of examples: mixup and cutmix.

Examples 0 and 1 of a batch are a pair, examples 2 and 3 are a pair, and so on (position XOR 1). A device's slice has an
even size and starts at an even position. So both examples of a pair are on one device, with any number of devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.augment.geometry import centered
from jaxddp.config import AugmentConfig
from jaxddp.core.errors import InputError, Key


class Mixing(NamedTuple):
    """The label of each example's partner, and the weights of the two labels."""

    label: jax.Array
    """int32[B], the label of the partner; [B, K] if examples may have several labels."""
    weight: jax.Array
    """float32[B], the weight of the example's own label. The weight of the partner's label is 1 minus this weight."""


def check_mixing(augment: AugmentConfig, batch_size: int, parts: int) -> None:
    """Raise `InputError` if a batch is divided into parts with an odd number of examples."""
    key, share = "mixup" if augment.mixup else "cutmix", batch_size // parts
    alpha = getattr(augment, key)
    if alpha and share % 2:
        batches = " or ".join(str(size * parts) for size in (share - 1, share + 1) if size)
        why = " mixes pairs of images within a part of the batch, but ", Key("train.batch_size", batch_size)
        odd = f" makes {parts} parts of {share}, an odd number"
        raise InputError(Key(f"data.augment.{key}", alpha), why, odd, advice=f"a batch of {batches} would do")


def check_unmixed(augment: AugmentConfig, subject: Key) -> None:
    """Raise `InputError` about a key that does not support mixed images if images are mixed."""
    if augment.mixup or augment.cutmix:
        name = "mixup" if augment.mixup else "cutmix"
        key = Key(f"data.augment.{name}", getattr(augment, name))
        raise InputError(subject, " does not mix images, and ", key, " is set", advice="leave it out")


def mix(
    keys: jax.Array, images: jax.Array, labels: jax.Array, mask: jax.Array, *, mixup: float, cutmix: float
) -> tuple[jax.Array, Mixing]:
    """Mix each image with its partner. Return the mixed images, and the labels with their weights.

    If mixup and cutmix are both enabled, each pair uses one of the two methods, with probability 1/2 each. An example
    whose partner is padding is not changed.

    Args:
        keys: the random keys of the examples, [B]; B is even.
        images: float[B, H, W, C], finite.
        labels: int32[B], or [B, K].
        mask: float32[B], 0 for padding.
        mixup, cutmix: the alpha of the Beta distribution of each method; 0 disables it. At least one is above 0.
    """
    choice, draw = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    if mixup and cutmix:
        bit = jax.vmap(jax.random.bernoulli)(choice)
        # The exclusive or of the two bits is the same for both examples of a pair.
        take_box = bit ^ partners(bit)
        boxed, blended = _boxed(draw, images, cutmix), _blended(draw, mixup)
        weight = jnp.where(take_box, boxed[0], blended[0])
        kept = jnp.where(take_box[:, None, None], boxed[1], blended[1])
    else:
        weight, kept = _blended(draw, mixup) if mixup else _boxed(draw, images, cutmix)
    is_paired = (mask > 0) & (partners(mask) > 0)
    weight, kept = jnp.where(is_paired, weight, 1), jnp.where(is_paired[:, None, None], kept, 1)
    kept = kept[..., None].astype(images.dtype)
    mixed = kept * images + (1 - kept) * partners(images)
    is_paired = is_paired if labels.ndim == 1 else is_paired[:, None]
    return mixed, Mixing(jnp.where(is_paired, partners(labels), labels), weight)


def mixup_weight(key: jax.Array, alpha: float) -> jax.Array:
    """Draw mixup's lambda (Zhang et al. 2018, arXiv:1710.09412), float32[], from Beta(alpha, alpha).

    It is (1 + t / sqrt(2 alpha + t^2)) / 2, with Student's t of 2 alpha degrees of freedom by Bailey's polar method
    (1994, Mathematics of Computation 62). `jax.random.beta` has loops, for whose conditions the host of a GPU waits.
    """
    radius, angle = jax.random.uniform(key, (2,), jnp.float32)
    cosine, power = jnp.cos(2 * jnp.pi * angle), radius ** (1 / alpha)
    square = (1 - power) * jnp.square(cosine)
    return (1 + jnp.sign(cosine) * jnp.sqrt(square / (power + square))) / 2


def cutmix_mask(key: jax.Array, alpha: float, height: int, width: int) -> jax.Array:
    """Return the mask, bool[height, width], of the pixels that cutmix keeps (Yun et al. 2019, arXiv:1905.04899).

    Pixels in a box come from the partner. The sides of the box are sqrt(1 - lambda) times those of the image, rounded
    down, with lambda drawn from Beta(alpha, alpha). (timm and torchvision round half of a side down, so their sides may
    be one pixel shorter.) The centre of the box is uniform over the image. If the borders clip the box, the kept share
    of the pixels is larger than lambda. Labels are weighted by the kept share.
    """
    weight_key, place_key = jax.random.split(key)
    side = jnp.sqrt(1 - mixup_weight(weight_key, alpha))
    box_height, box_width = (side * height).astype(jnp.int32), (side * width).astype(jnp.int32)
    return ~centered(place_key, height, width, box_height, box_width).mask(height, width)


def _blended(keys: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Return mixup's weights of each example's own label, float32[B], and own pixels, float32[B, 1, 1]."""
    weight = jax.vmap(lambda key: mixup_weight(key, alpha))(keys)
    return weight, weight[:, None, None]


def _boxed(keys: jax.Array, images: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Return cutmix's weights of each example's own label, float32[B], and own pixels, float32[B, H, W]."""
    _, height, width, _ = images.shape
    kept = jax.vmap(lambda key: cutmix_mask(key, alpha, height, width))(keys).astype(jnp.float32)
    return kept.mean((1, 2)), kept


def partners(column: jax.Array) -> jax.Array:
    """Swap the two examples of each pair."""
    return column.reshape(-1, 2, *column.shape[1:])[:, ::-1].reshape(column.shape)
