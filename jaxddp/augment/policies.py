"""Augmentation policies, which draw operations for each image: functions of uint8[H, W, C], by name, and RandAugment.

The tables of AutoAugment in `auto_augment.csv` are those of the paper's appendix (Cubuk et al. 2019, arXiv:1805.09501).
A policy has 25 sub-policies of two operations, each with a probability and an index of its magnitude. An operation
without a magnitude has index 0.
"""

import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np

import jaxddp.augment.operations as ops
from jaxddp.config import AugmentConfig
from jaxddp.config.registry import POLICIES
from jaxddp.core.errors import InputError, Key

Policy = Callable[[jax.Array, jax.Array], jax.Array]

# --- TrivialAugment: one random operation with a random magnitude (Müller & Hutter 2021, arXiv:2103.10158) ---


def wide_space() -> ops.Space:
    """Return the space of TrivialAugment Wide: 31 magnitudes of each operation.

    The ranges are those of table 6 of the paper. The largest translation is 32 pixels for images of any size. The
    solarize thresholds and the number of bits of posterize are torchvision's.
    """
    steps = np.arange(31) / 30
    others = {"posterize": 8 - np.round(6 * steps), "solarize": 255 - 255 * steps}
    return ops.space_of(ops.OPERATIONS, steps, others, largest=(0.99, 0.99, 135), shift=(32, 32))


@POLICIES.add("trivial_augment")
def trivial_augment(settings: AugmentConfig) -> Policy:
    """Return TrivialAugment Wide. The operation, the magnitude and the direction are uniform and independent."""
    space = wide_space()
    table = np.array([ops.rows(space, name) for name in ops.OPERATIONS])

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        index = jax.random.randint(key, (), 0, table[..., 0].size, jnp.int32)
        return ops.on_planes(ops.operate, image, ops.drawn(table, index))

    return apply


# --- AutoAugment ---

Choice = tuple[str, float, int]
"""An operation with its probability and the index of its magnitude."""


def _tables() -> dict[str, list[tuple[Choice, Choice]]]:
    """Return the sub-policies of each policy, which `auto_augment.csv` lists."""
    tables: dict[str, list[tuple[Choice, Choice]]] = {}
    with (Path(__file__).parent / "auto_augment.csv").open(encoding="utf-8", newline="") as file:
        for name, *cells in itertools.islice(csv.reader(file), 1, None):
            first, second = ((cells[at], float(cells[at + 1]), int(cells[at + 2])) for at in (0, 3))
            tables.setdefault(name, []).append((first, second))
    return tables


TABLES = _tables()


def learned_space(size: ops.Size) -> ops.Space:
    """Return the 10 magnitudes of each operation, as in torchvision; "invert" has none."""
    steps, (height, width) = np.arange(10) / 9, size
    others = {"posterize": 8 - np.round(4 * steps), "solarize": 255 - 255 * steps}
    return ops.space_of(ops.OPERATIONS, steps, others, shift=(150 / 331 * width, 150 / 331 * height))


@POLICIES.add(*TABLES)
def auto_augment(settings: AugmentConfig) -> Policy:
    """Return AutoAugment: a random sub-policy, in random directions."""
    policy = TABLES[settings.policy or ""]
    probabilities = jnp.array([[probability for _, probability, _ in pair] for pair in policy], jnp.float32)

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        space = learned_space(image.shape[:2])
        # The last axes are: sub-policy, operation, outcome (skipped, either direction), parameters.
        table = np.array([[[ops.IDENTITY, *ops.rows(space, name)[at]] for name, _, at in pair] for pair in policy])
        pair_key, use_key, sign_key = jax.random.split(key, 3)
        pair = jax.random.randint(pair_key, (), 0, len(policy), jnp.int32)
        is_used = jax.random.bernoulli(use_key, probabilities[pair])
        outcome = jnp.where(is_used, jax.random.randint(sign_key, (2,), 1, 3, jnp.int32), 0)
        drawn = ops.drawn(table, (2 * pair + jnp.arange(2)) * 3 + outcome)
        return ops.on_planes(ops.operate_all, image, drawn)

    return apply


# --- AugMix: a mixture of an image with chains of operations on it (Hendrycks et al. 2020, arXiv:1912.02781) ---

WIDTH, DEEPEST, SEVERITY = 3, 3, 3
"""The number of chains, the largest number of operations of a chain, and the number of magnitudes that are drawn."""
UNIT = 1 << 12
"""Weights are multiples of 1/4,096, so the mixture is exact in 32-bit integers."""


def mixing_space(size: ops.Size) -> ops.Space:
    """Return the first three of torchvision's 10 magnitudes of each operation of the paper.

    The paper leaves out the operations that resemble the corruptions of ImageNet-C: brightness, color, contrast and
    sharpness.
    """
    steps, (height, width) = np.arange(SEVERITY) / 9, size
    others = {"posterize": 4 - np.round(4 * steps), "solarize": 255 - 255 * steps}
    names = "autocontrast", "equalize", "posterize", "rotate", "solarize", "shear_x", "shear_y"
    return ops.space_of((*names, "translate_x", "translate_y"), steps, others, shift=(width / 3, height / 3))


@POLICIES.add("augmix")
def augmix(settings: AugmentConfig) -> Policy:
    """Return AugMix.

    Each of three chains applies 1 to 3 operations. Dirichlet(1, 1, 1) gives the weights of the chains, and Beta(1, 1)
    the weight of their mixture against the image. The authors mix normalized images, which is the same but for the
    rounding of the mixture to a whole level.
    """

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        chain_key, weight_key = jax.random.split(key)
        return ops.on_planes(mixture, image, draw_chains(chain_key, image.shape[:2]), draw_weights(weight_key))

    return apply


def draw_chains(key: jax.Array, size: ops.Size) -> ops.PixelOperation:
    """Draw the operations of all chains, int32[WIDTH, DEEPEST] each. The identity follows the end of a chain."""
    space = mixing_space(size)
    table = np.array([each for name in space for pair in ops.rows(space, name) for each in pair])
    operation_key, depth_key = jax.random.split(key)
    index = jax.random.randint(operation_key, (WIDTH, DEEPEST), 0, len(table), jnp.int32)
    depth = jax.random.randint(depth_key, (WIDTH, 1), 1, DEEPEST + 1, jnp.int32)
    index = jnp.where(jnp.arange(DEEPEST) < depth, index, len(table))
    return ops.drawn(np.concatenate([table, [ops.IDENTITY]]), index)


def draw_weights(key: jax.Array) -> jax.Array:
    """Draw the weights of the image and of the chains, uint32[1 + WIDTH], in units of 1/`UNIT`**2. Their sum is 1.

    The differences of sorted uniform numbers have the distribution Dirichlet(1, …, 1). Beta(1, 1) is uniform.
    """
    cuts = jax.random.randint(key, (WIDTH,), 0, UNIT + 1, jnp.int32)
    share, ends = cuts[0], jnp.sort(cuts[1:])
    of_chains = jnp.diff(ends, prepend=0, append=UNIT)
    return jnp.concatenate([(UNIT - share)[None] * UNIT, share * of_chains]).astype(jnp.uint32)


def mixture(planes: jax.Array, chains: ops.PixelOperation, weights: jax.Array) -> jax.Array:
    """Return the weighted mean of uint8[C, H, W] and of the results of chains of operations, rounded.

    Args:
        chains: int32[WIDTH, DEEPEST] each.
        weights: uint32[1 + WIDTH]; see `draw_weights`.
    """

    def add(total: jax.Array, chain: tuple[ops.PixelOperation, jax.Array]) -> tuple[jax.Array, None]:
        parameters, weight = chain
        return total + weight * ops.operate_all(planes, parameters).astype(jnp.uint32), None

    # The largest sum is 255.5 * 2**24, which fits into 32 bits.
    total, _ = jax.lax.scan(add, weights[0] * planes.astype(jnp.uint32), (chains, weights[1:]))
    return ((total + UNIT**2 // 2) // UNIT**2).astype(planes.dtype)


# --- 3-Augment: grayscale, solarize or blur, and then color jitter (Touvron et al. 2022, arXiv:2204.07118) ---

JITTER = (0.3, 0.3, 0.3, 0.0)
THRESHOLD = 128
RADII = tuple(radius / 100 for radius in range(10, 201))
"""The radii of the blur in pixels: 0.10, 0.11, …, 2.00. The authors draw from the interval of the same bounds."""


@POLICIES.add("three_augment")
def three_augment(settings: AugmentConfig) -> Policy:
    """Return 3-Augment.

    Grayscale, solarize (threshold 128) and Gaussian blur are equally likely. Color jitter has strength 0.3 for
    brightness, contrast and saturation.

    Raises: InputError if the config has further color jitter.
    """
    if settings.color_jitter:
        policy = Key.plain("data.augment.policy", "three_augment"), " has color jitter of its own"
        jitter = Key("data.augment.color_jitter", settings.color_jitter)
        raise InputError(jitter, ": ", policy, advice="set one of them")
    table = np.array([ops.box_weights(radius) for radius in RADII], np.uint32)

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        choice_key, radius_key, jitter_key = jax.random.split(key, 3)
        choice = jax.random.randint(choice_key, (), 0, 3, jnp.int32)
        radius = jax.random.randint(radius_key, (), 0, len(RADII), jnp.int32)

        def changed(planes: jax.Array) -> jax.Array:
            return ops.color_jitter(jitter_key, one_of_three(planes, choice, jnp.array(table)[radius]), JITTER)

        return ops.on_planes(changed, image)

    return apply


def one_of_three(planes: jax.Array, choice: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the gray (`choice` 0), solarized (1) or blurred (2) image of uint8[C, H, W].

    Args:
        choice: int32[].
        weights: the weights of the blur, uint32[3]; see `jaxddp.augment.operations.box_weights`.
    """
    gray = jnp.broadcast_to(ops.gray_of(planes.astype(jnp.int32)), planes.shape).astype(planes.dtype)
    solarized = jnp.where(planes < THRESHOLD, planes, 255 - planes)
    return jnp.select([choice == 0, choice == 1], [gray, solarized], ops.blur(planes, weights))


# --- RandAugment: random operations with one magnitude (Cubuk et al. 2020, arXiv:1909.13719) ---
# "paper": the 14 operations of the paper with the ranges of AutoAugment. At magnitude 0 an operation has no effect. At
# the largest magnitude the parameters are: rotate 30 degrees, shear 0.3, translate 150/331 of the side, solarize
# threshold 0 (from 256), posterize 4 bits (from 8), blend factor 0.9 away from 1.
# "timm": the 15 operations of timm's "rand-m9-inc1" (github.com/huggingface/pytorch-image-models,
# timm/data/auto_augment.py): invert and solarize_add in place of the identity, translations up to 0.45 of the side, and
# posterize from 4 bits to 0.
# Results equal Pillow's (ImageOps, ImageEnhance, nearest neighbour), except that a blend is rounded instead of
# truncated.

LARGEST = 10
QUANTILES = 100
"""The number of magnitudes, which are equally likely, if the magnitude is random."""
TIMM = ("color", "contrast", "brightness", "sharpness", "autocontrast", "equalize", "rotate", "shear_x", "shear_y")
TIMM += ("invert", "translate_x", "translate_y", "posterize", "solarize", "solarize_add")
"""The operations of "timm", in the order in which they are drawn."""


def rand_space(settings: AugmentConfig, size: ops.Size) -> ops.Space:
    """Return the magnitudes of each operation for images of a size, from the smallest to the largest."""
    level, (height, width) = np.array([settings.rand_magnitude]), size
    if settings.rand_deviation:
        normal = NormalDist(settings.rand_magnitude, settings.rand_deviation)
        level = np.array([normal.inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)]).clip(0, LARGEST)
    share = level / LARGEST
    if settings.rand_operations == "timm":
        others = {"posterize": 4 - np.floor(4 * share), "solarize": 256 - np.floor(256 * share)}
        others |= {"translate_x": np.round(0.45 * width * share), "translate_y": np.round(0.45 * height * share)}
        return ops.space_of(TIMM, share, others | {"solarize_add": np.floor(110 * share)})
    others = {"posterize": 8 - np.round(4 * share), "solarize": np.round(256 * (1 - share))}
    others |= {"translate_x": -np.round(150 / 331 * width * share)}
    others |= {"translate_y": -np.round(150 / 331 * height * share)}
    return ops.space_of(ops.OPERATIONS, share, others)


def rand_augment(key: jax.Array, image: jax.Array, settings: AugmentConfig) -> jax.Array:
    """Apply random operations to uint8[H, W, C], one for each layer.

    Operation, direction and magnitude of a layer are uniform and independent. A layer is skipped with probability
    1 - `settings.rand_probability`.
    """
    space, layers = rand_space(settings, image.shape[:2]), (settings.rand_augment,)
    table = np.array([ops.rows(space, name) for name in space])
    count, levels, _, fields = table.shape
    operation_key, sign_key, level_key, use_key = jax.random.split(key, 4)
    operation = jax.random.randint(operation_key, layers, 0, count, jnp.int32)
    direction = (1 - jax.random.rademacher(sign_key, layers, jnp.int32)) // 2
    level = jax.random.randint(level_key, layers, 0, levels, jnp.int32)
    index = (operation * levels + level) * 2 + direction
    is_used = jax.random.bernoulli(use_key, jnp.float32(settings.rand_probability), layers)
    index = jnp.where(is_used, index, 2 * count * levels)
    parameters = ops.drawn(np.concatenate([table.reshape(-1, fields), [ops.IDENTITY]]), index)
    return ops.on_planes(ops.operate_all, image, parameters)
