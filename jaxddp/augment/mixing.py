"""Mix the images and labels of pairs of examples: mixup and cutmix.

Each example is paired with its neighbour in the batch (position XOR 1). A device's slice has an even size and starts at
an even position. So both examples of a pair are on one device, and the pairs are the same on any number of devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.augment.box import centered
from jaxddp.config import AugmentConfig
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key


class Mixing(NamedTuple):
    """The label of each example's partner, and the weights of the two labels."""

    label: jax.Array
    """int32[B], the label of the partner; [B, K] if examples may have several labels."""
    weight: jax.Array
    """float32[B], the weight of the example's own label; the partner's label has the rest."""


def check_mixing(augment: AugmentConfig, batch_size: int, parts: int) -> None:
    """Raise `InputError` if the equal parts into which a batch is divided do not consist of pairs."""
    key = "mixup" if augment.mixup else "cutmix"
    alpha = getattr(augment, key)
    share = batch_size // parts
    if alpha and share % 2:
        near = " or ".join(str(size * parts) for size in (share - 1, share + 1) if size)
        raise InputError(
            Key(f"data.augment.{key}", alpha),
            " mixes pairs of images within a part of the batch, but ",
            Key("train.batch_size", batch_size),
            f" makes {parts} parts of {share}, an odd number",
            advice=f"a batch of {near} would do",
        )


def mix(
    keys: jax.Array, images: jax.Array, labels: jax.Array, mask: jax.Array, *, mixup: float, cutmix: float
) -> tuple[jax.Array, Mixing]:
    """Mix each image with its partner. Return the mixed images and the labels with their weights.

    If both mixup and cutmix are given, each pair uses one of them with equal probability. An example whose partner is
    padding is not changed.

    Args:
        keys: the examples' random keys, [B], B even.
        images: float[B, H, W, C], finite.
        labels: int32[B], or [B, K].
        mask: float32[B], 0 for padding.
        mixup, cutmix: the alpha of each method's Beta distribution, 0 for none; not both 0.
    """
    choice, draw = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    if mixup and cutmix:
        bit = jax.vmap(jax.random.bernoulli)(choice)
        # The exclusive or of both bits is the same for both examples of a pair.
        take_box = bit ^ _partners(bit)
        boxed, blended = _boxed(draw, images, cutmix), _blended(draw, mixup)
        weight = jnp.where(take_box, boxed[0], blended[0])
        kept = jnp.where(take_box[:, None, None], boxed[1], blended[1])
    else:
        weight, kept = _blended(draw, mixup) if mixup else _boxed(draw, images, cutmix)
    both = (mask > 0) & (_partners(mask) > 0)
    weight, kept = jnp.where(both, weight, 1), jnp.where(both[:, None, None], kept, 1)
    kept = kept[..., None].astype(images.dtype)
    mixed = kept * images + (1 - kept) * _partners(images)
    both = both if labels.ndim == 1 else both[:, None]
    return mixed, Mixing(jnp.where(both, _partners(labels), labels), weight)


def mixup_weight(key: jax.Array, alpha: float) -> jax.Array:
    """Draw lambda of mixup (Zhang et al. 2018, arXiv:1710.09412): float32[] from Beta(alpha, alpha)."""
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


def cutmix_kept(key: jax.Array, alpha: float, height: int, width: int) -> jax.Array:
    """Return bool[height, width]: the pixels that cutmix keeps from the image (Yun et al. 2019, arXiv:1905.04899).

    The pixels in a box come from the partner. Its sides are sqrt(1 - lambda) times those of the image, with lambda
    drawn from Beta(alpha, alpha). Its centre is uniform over the image. Where the borders clip the box, the kept share
    is larger than lambda. Labels are weighted by the kept share.
    """
    weight_key, place_key = jax.random.split(key)
    side = jnp.sqrt(1 - mixup_weight(weight_key, alpha))
    box_height, box_width = (side * height).astype(jnp.int32), (side * width).astype(jnp.int32)
    return ~centered(place_key, height, width, box_height, box_width).mask(height, width)


def _blended(keys: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Return mixup's weights of the examples' own labels, float32[B], and of their own pixels, float32[B, 1, 1]."""
    weight = jax.vmap(lambda key: mixup_weight(key, alpha))(keys)
    return weight, weight[:, None, None]


def _boxed(keys: jax.Array, images: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Return cutmix's weights of the examples' own labels, float32[B], and of their own pixels, float32[B, H, W]."""
    _, height, width, _ = images.shape
    kept = jax.vmap(lambda key: cutmix_kept(key, alpha, height, width))(keys).astype(jnp.float32)
    return kept.mean((1, 2)), kept


def _partners(column: jax.Array) -> jax.Array:
    """Swap the two examples of each pair."""
    return column.reshape(-1, 2, *column.shape[1:])[:, ::-1].reshape(column.shape)
