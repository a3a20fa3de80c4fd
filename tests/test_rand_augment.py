"""RandAugment: each operation compared with its definition in NumPy and with Pillow, and the distribution of draws."""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from jaxddp.augment.operations import FILL, OPERATIONS, PixelOperation, operate, rows
from jaxddp.augment.policies import rand_augment, rand_space
from jaxddp.config import AugmentConfig

RNG = np.random.default_rng(0)
HEIGHT, WIDTH = 21, 32
WARPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
BLENDS = ("color", "contrast", "brightness", "sharpness")

IMAGES = {
    "noise": RNG.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8),
    "narrow": RNG.normal((90, 120, 150), (5, 20, 40), (HEIGHT, WIDTH, 3)).clip(1, 254).astype(np.uint8),
    "one value": np.full((HEIGHT, WIDTH, 3), (7, 0, 255)),
    "gray": RNG.integers(20, 200, (HEIGHT, WIDTH, 1)),
    "two pixels": RNG.integers(0, 256, (1, 2, 3)),
}
IMAGES = {name: image.astype(np.uint8) for name, image in IMAGES.items()}


@pytest.fixture(scope="module")
def run():
    """Return a function (name, image, signed magnitude) -> image, with one program for each shape."""
    program = jax.jit(lambda planes, parameters: operate(planes, PixelOperation(*parameters)))

    def run(name: str, image: np.ndarray, magnitude: float, operations: str = "paper") -> np.ndarray:
        settings = AugmentConfig(rand_magnitude=abs(magnitude), rand_operations=operations)
        parameters = rows(rand_space(settings, image.shape[:2]), name)[0][0 if magnitude >= 0 else 1]
        done = np.moveaxis(np.array(program(np.moveaxis(image, -1, 0), np.array(parameters, np.int32))), 0, -1)
        assert done.dtype == np.uint8 and done.shape == image.shape
        return done

    return run


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("autocontrast", "equalize")])
def test_at_magnitude_0_an_operation_does_nothing(name, run):
    assert (run(name, IMAGES["noise"], 0.0) == IMAGES["noise"]).all()


def pillow(name: str, image: np.ndarray, magnitude: float) -> np.ndarray:
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    share, color = magnitude / 10, FILL if image.shape[-1] == 1 else (FILL,) * 3
    width, height = picture.size
    matrices = {
        "shear_x": (1, 0.3 * share, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * share, 1, 0),
        "translate_x": (1, 0, round(150 / 331 * width * share), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, round(150 / 331 * height * share)),
    }
    enhancers = {name: getattr(ImageEnhance, name.title()) for name in BLENDS}
    if name in matrices:
        done = picture.transform(picture.size, Image.Transform.AFFINE, matrices[name], fillcolor=color)
    elif name in enhancers:
        done = enhancers[name](picture).enhance(1 + 0.9 * share)
    else:
        done = {
            "identity": picture.copy,
            "rotate": lambda: picture.rotate(30 * share, fillcolor=color),
            "autocontrast": lambda: ImageOps.autocontrast(picture),
            "equalize": lambda: ImageOps.equalize(picture),
            "solarize": lambda: ImageOps.solarize(picture, round(256 * (1 - abs(share)))),
            "posterize": lambda: ImageOps.posterize(picture, 8 - round(4 * abs(share))),
        }[name]()
    return np.array(done).reshape(image.shape)


@pytest.mark.parametrize("magnitude", [4.0, -9.0])
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_equals_pillows(name, kind, magnitude, run):
    """Pillow computes in floating point and truncates, so autocontrast and blends may differ by 1. A few sources of a
    warp are on a border between pixels."""
    image = IMAGES[kind]
    ours, theirs = run(name, image, magnitude).astype(int), pillow(name, image, magnitude).astype(int)
    difference = np.abs(ours - theirs)
    if name in WARPS:
        assert (difference.max(-1) > 0).mean() < 0.01
    else:
        assert difference.max(initial=0) <= (name in ("autocontrast", *BLENDS))


def augmented(keys: jax.Array, image: np.ndarray, layers: int, **settings) -> np.ndarray:
    config = AugmentConfig(rand_augment=layers, **{"rand_magnitude": 7.0, **settings})
    return np.array(jax.jit(jax.vmap(lambda key: rand_augment(key, jnp.array(image), config)))(keys))


@pytest.mark.slow
def test_each_operation_and_each_direction_is_drawn_with_equal_chance(run):
    image, number = IMAGES["narrow"], 2800
    directed = (*WARPS, *BLENDS)
    operations = {run(name, image, sign * 7.0).tobytes(): (name, sign) for name in OPERATIONS for sign in (-1, 1)}
    assert len(operations) == len(OPERATIONS) + len(directed)
    counts = dict.fromkeys(operations.values(), 0)
    for result in augmented(jax.random.split(jax.random.key(1), number), image, 1):
        counts[operations[result.tobytes()]] += 1
    for (name, _), count in counts.items():
        share = 1 / len(OPERATIONS) / (2 if name in directed else 1)
        assert abs(count - number * share) < 4.5 * math.sqrt(number * share * (1 - share)), name


TIMM_OPERATIONS = {*OPERATIONS} - {"identity"} | {"invert", "solarize_add"}
"""The operations of timm 1.0.31's "rand-m9-mstd0.5-inc1"."""


@pytest.mark.parametrize("magnitude", [9.0, 6.0, 0.0])
def test_timms_operations_equal_their_definitions(magnitude, run):
    image, share = IMAGES["noise"], magnitude / 10
    value, pixels = np.arange(256), image.astype(int)
    kept = 4 - int(4 * share)
    tables = {
        "invert": 255 - value,
        "solarize": np.where(value < 256 - int(256 * share), value, 255 - value),
        "solarize_add": np.where(value < 128, np.minimum(value + int(110 * share), 255), value),
        "posterize": value >> (8 - kept) << (8 - kept),
    }
    for name, lookup in tables.items():
        assert (run(name, image, magnitude, "timm") == lookup[pixels]).all(), name
    shift = round(0.45 * WIDTH * share)
    moved = np.full_like(image, FILL)
    moved[:, : WIDTH - shift] = image[:, shift:]
    assert (run("translate_x", image, -magnitude, "timm") == moved).all()
    for name in ("rotate", "shear_y", "color", "sharpness", "autocontrast", "equalize"):
        assert (run(name, image, magnitude, "timm") == run(name, image, magnitude)).all()
    assert {*rand_space(AugmentConfig(rand_operations="timm"), image.shape[:2])} == TIMM_OPERATIONS


def test_the_magnitude_of_timms_recipes_is_drawn_from_a_clipped_normal_distribution():
    """In 10^6 draws of timm's rule, min(max(N(9, 0.5), 0), 10): mean 8.996, deviation 0.490, 2.3% are 10."""
    levels = rand_space(AugmentConfig(rand_deviation=0.5), (10, 10))["rotate"] / 3
    assert len(levels) == 100 and (levels == 10).mean() == pytest.approx(0.023, abs=0.006)
    assert (levels.mean(), levels.std()) == pytest.approx((8.996, 0.490), abs=0.01)
    assert len(rand_space(AugmentConfig(), (10, 10))["rotate"]) == 1


@pytest.mark.slow
def test_a_layer_is_applied_with_its_probability_and_draws_its_magnitude(run):
    image, number = IMAGES["narrow"], 2000
    settings = {"rand_operations": "timm", "rand_probability": 0.5, "rand_deviation": 2.0}
    results = [
        result.tobytes() for result in augmented(jax.random.split(jax.random.key(4), number), image, 1, **settings)
    ]
    unchanged = sum(result == image.tobytes() for result in results) / number
    assert abs(unchanged - 0.5) < 4 * math.sqrt(0.25 / number)
    # 9 of 15 operations of this image have many magnitudes; the rest gives few results.
    assert len({*results}) > 200
    assert np.ptp(augmented(jax.random.split(jax.random.key(4), 50), image, 2, rand_probability=0.0), 0).max() == 0


def test_draws_with_the_default_settings_do_not_change():
    """The digest is that of the first implementation of RandAugment, which had no table of parameters."""
    results = augmented(jax.random.split(jax.random.key(0), 64), IMAGES["noise"], 2, rand_magnitude=9.0)
    assert hashlib.sha256(results.tobytes()).hexdigest()[:16] == "c3baf86163e34a88"
