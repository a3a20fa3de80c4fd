"""AutoAugment: learned policies of two operations (Cubuk et al. 2019, arXiv:1805.09501).

A policy has 25 sub-policies of two operations, each with a probability and an index of its magnitude. One sub-policy is
drawn for each image. The tables are those of the paper's appendix; an operation without a magnitude has index 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.operations import IDENTITY, Size, Space, drawn, operate_all, rows
from jaxddp.config.registry import POLICIES

BINS = 10

Choice = tuple[str, float, int]
"""An operation with its probability and the index of its magnitude."""

IMAGENET: tuple[tuple[Choice, Choice], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 0)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
    (("equalize", 0.0, 0), ("equalize", 0.8, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 0)),
    (("color", 0.4, 0), ("equalize", 0.6, 0)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
)
CIFAR10: tuple[tuple[Choice, Choice], ...] = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
    (("color", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
)
SVHN: tuple[tuple[Choice, Choice], ...] = (
    (("shear_x", 0.9, 4), ("invert", 0.2, 0)),
    (("shear_y", 0.9, 8), ("invert", 0.7, 0)),
    (("equalize", 0.6, 0), ("solarize", 0.6, 6)),
    (("invert", 0.9, 0), ("equalize", 0.6, 0)),
    (("equalize", 0.6, 0), ("rotate", 0.9, 3)),
    (("shear_x", 0.9, 4), ("autocontrast", 0.8, 0)),
    (("shear_y", 0.9, 8), ("invert", 0.4, 0)),
    (("shear_y", 0.9, 5), ("solarize", 0.2, 6)),
    (("invert", 0.9, 0), ("autocontrast", 0.8, 0)),
    (("equalize", 0.6, 0), ("rotate", 0.9, 3)),
    (("shear_x", 0.9, 4), ("solarize", 0.3, 3)),
    (("shear_y", 0.8, 8), ("invert", 0.7, 0)),
    (("equalize", 0.9, 0), ("translate_y", 0.6, 6)),
    (("invert", 0.9, 0), ("equalize", 0.6, 0)),
    (("contrast", 0.3, 3), ("rotate", 0.8, 4)),
    (("invert", 0.8, 0), ("translate_y", 0.0, 2)),
    (("shear_y", 0.7, 6), ("solarize", 0.4, 8)),
    (("invert", 0.6, 0), ("rotate", 0.8, 4)),
    (("shear_y", 0.3, 7), ("translate_x", 0.9, 3)),
    (("shear_x", 0.1, 6), ("invert", 0.6, 0)),
    (("solarize", 0.7, 2), ("translate_y", 0.6, 7)),
    (("shear_y", 0.8, 4), ("invert", 0.8, 0)),
    (("shear_x", 0.7, 9), ("translate_y", 0.8, 3)),
    (("shear_y", 0.8, 5), ("autocontrast", 0.7, 0)),
    (("shear_x", 0.7, 2), ("invert", 0.1, 0)),
)
TABLES = {
    "auto_augment_imagenet": IMAGENET,
    "auto_augment_cifar10": CIFAR10,
    "auto_augment_svhn": SVHN,
}


def learned_space(size: Size) -> dict[str, Space]:
    """Return the 10 magnitudes of each operation, as in torchvision; "invert" has none."""
    steps = np.arange(BINS) / (BINS - 1)
    height, width = size
    return {
        **{name: Space(np.zeros(BINS), False) for name in ("autocontrast", "equalize")},
        **{name: Space(0.9 * steps, True) for name in ("brightness", "color", "contrast", "sharpness")},
        "posterize": Space(8 - np.round(4 * steps), False),
        "rotate": Space(30 * steps, True),
        "solarize": Space(255 - 255 * steps, False),
        "shear_x": Space(0.3 * steps, True),
        "shear_y": Space(0.3 * steps, True),
        "translate_x": Space(150 / 331 * width * steps, True),
        "translate_y": Space(150 / 331 * height * steps, True),
    }


def _augment_from(policy: tuple[tuple[Choice, Choice], ...]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a policy, a function of uint8[H, W, C]: a random sub-policy, in random directions."""
    probabilities = jnp.array([[probability for _, probability, _ in pair] for pair in policy], jnp.float32)

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        height, width, _ = image.shape
        space = learned_space((height, width))
        choices = [[rows(space, name)[index if name in space else 0] for name, _, index in pair] for pair in policy]
        # The last axes are: sub-policy, operation, outcome (skipped, either direction), parameters.
        table = np.array([[[IDENTITY, *directions] for directions in pair] for pair in choices])
        pair_key, use_key, sign_key = jax.random.split(key, 3)
        pair = jax.random.randint(pair_key, (), 0, len(policy), jnp.int32)
        is_used = jax.random.bernoulli(use_key, probabilities[pair])
        outcome = jnp.where(is_used, jax.random.randint(sign_key, (2,), 1, 3, jnp.int32), 0)
        index = (2 * pair + jnp.arange(2)) * 3 + outcome
        return jnp.moveaxis(
            operate_all(jnp.moveaxis(image, -1, 0), drawn(table.reshape(-1, table.shape[-1]), index)), 0, -1
        )

    return apply


for name in TABLES:
    POLICIES.add(name)(lambda settings, name=name: _augment_from(TABLES[name]))
