"""Augmentation on the device: the results, random keys and error messages of each augmentation."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support.data import random_batch, random_table
from support.errors import error_line
from support.networks import linear_model
from support.runs import setup_of
from support.shared import sgd

from jaxddp.augment.geometry import ASPECT, cutout, erase, erasing_box
from jaxddp.augment.operations import grayscale
from jaxddp.augment.preprocess import Inputs, Preprocess, check_augmentation
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch

PLAIN = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
"""Normalization that keeps pixel values unchanged."""
EVERYTHING = AugmentConfig(pad=1, rand_augment=2, cutout=2, erase=0.5, mixup=0.4, cutmix=1.0)
PER_IMAGE = AugmentConfig(pad=1, cutout=2, erase=0.5)
"""The augmentations of a single image, without RandAugment, which takes long to compile."""


def images_of(batch: Batch, augment: AugmentConfig, seed: int = 0, **settings) -> np.ndarray:
    return np.array(inputs_of(batch, Preprocess(augment=augment, **settings), jax.random.key(seed)).images)


@functools.partial(jax.jit, static_argnums=1)
def inputs_of(batch: Batch, preprocess: Preprocess, key: jax.Array | None = None) -> Inputs:
    return preprocess(batch, train=True, key=key)


def keys(number: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), number)


def test_an_alternating_flip_is_random_first_and_then_the_opposite():
    settings = AugmentConfig(flip=False, alternate_flip=True)
    batch = random_batch(64)
    batches = [batch._replace(epoch=np.full(64, epoch, np.int32)) for epoch in range(4)]
    epochs = [images_of(each, settings, **PLAIN).round() for each in batches]
    np.testing.assert_array_equal(epochs[0], images_of(batch, AugmentConfig(), **PLAIN).round())
    for epoch, images in enumerate(epochs):
        np.testing.assert_array_equal(images, epochs[0] if epoch % 2 == 0 else epochs[0][:, :, ::-1])
    mirrored = [not np.array_equal(image, original) for image, original in zip(epochs[0], batch.image, strict=True)]
    assert 16 < sum(mirrored) < 48


@pytest.mark.parametrize("border", ["black", "reflect"])
def test_an_image_is_a_crop_of_the_padded_image_or_of_its_mirror_image(border):
    batch = random_batch(64)
    images = images_of(batch, AugmentConfig(pad=2, border=border), **PLAIN).round().astype(int)
    padded = np.pad(batch.image, ((0, 0), (2, 2), (2, 2), (0, 0)), "reflect" if border == "reflect" else "constant")
    positions = set()
    for image, canvas in zip(images, padded, strict=True):
        places = itertools.product((1, -1), range(5), range(5))
        matches = [(flip, i, j) for flip, i, j in places if (canvas[:, ::flip][i : i + 6, j : j + 6] == image).all()]
        assert matches
        positions.add(matches[0])
    flips, tops, lefts = (set(values) for values in zip(*positions, strict=True))
    assert flips == {1, -1} and tops == lefts == set(range(5))


@pytest.mark.parametrize("side", [1, 4, 6])
def test_cutout_blackens_a_square_around_any_pixel_clipped_at_the_borders(side):
    image, number = np.full((6, 7, 3), 9, np.uint8), 4200
    squares, settings = {}, AugmentConfig(cutout=side)
    for row in range(6):
        for column in range(7):
            expected_image = image.copy()
            top, left = row - side // 2, column - side // 2
            expected_image[max(top, 0) : top + side, max(left, 0) : left + side] = 0
            squares.setdefault(expected_image.tobytes(), []).append((row, column))
    counts = dict.fromkeys(squares, 0)
    for augmented in np.array(jax.jit(jax.vmap(lambda key: cutout(key, jnp.array(image), settings)))(keys(number))):
        assert augmented.dtype == np.uint8
        counts[augmented.tobytes()] += 1
    for expected_image, count in counts.items():
        expected_count = number / 42 * len(squares[expected_image])
        assert abs(count - expected_count) < 5 * np.sqrt(expected_count)


def boxes(number: int, height: int, width: int, bounds: tuple[float, float] = (0.02, 0.4)) -> np.ndarray:
    """Return int[N, 4]: top, left, height, width."""
    return np.array(jax.jit(jax.vmap(lambda key: jnp.stack(erasing_box(key, height, width, bounds))))(keys(number)))


def test_erased_boxes_stay_within_the_bounds_and_reach_them():
    height, width = 224, 200
    top, left, box_height, box_width = boxes(4000, height, width).T
    assert box_height.min() > 0
    assert top.min() == left.min() == 0 and (top + box_height).max() == height and (left + box_width).max() == width
    area = box_height * box_width / (height * width)
    rounding = 0.5 * (1 / box_height + 1 / box_width) + 1e-6
    assert (area > 0.02 * (1 - rounding)).all() and (area < 0.4 * (1 + rounding)).all()
    assert area.min() < 0.022 and area.max() > 0.39
    ratio = box_height / box_width
    assert (ratio > ASPECT[0] * (1 - 2 * rounding)).all() and (ratio < ASPECT[1] * (1 + 2 * rounding)).all()
    assert abs((ratio > height / width).mean() - 0.5) < 0.05


def test_erasing_sets_a_rectangle_to_zero_with_its_probability():
    image, number = jnp.array(np.random.default_rng(0).uniform(1, 2, (16, 20, 3)), jnp.float32), 2000
    erased = np.array(jax.jit(jax.vmap(lambda key: erase(key, image, AugmentConfig(erase=0.3))))(keys(number)))
    assert erased.dtype == np.float32
    num_erased = 0
    for augmented in erased:
        is_erased = (augmented == 0).all(-1)
        assert (augmented[~is_erased] == np.array(image)[~is_erased]).all()
        rows, columns = np.flatnonzero(is_erased.any(1)), np.flatnonzero(is_erased.any(0))
        if is_erased.any():
            assert is_erased.sum() == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
            num_erased += 1
    assert abs(num_erased - 0.3 * number) < 5 * np.sqrt(number * 0.21)


def test_erasing_with_noise_fills_each_pixel_of_the_area_as_timm_does():
    """timm's mode "pixel" draws each value from the standard normal distribution, on 0.02 to 1/3 of the area."""
    image, number = jnp.full((60, 64, 3), 9.0), 300
    settings = AugmentConfig(erase=1.0, erase_area=(0.02, 1 / 3), erase_fill="noise")
    erased = np.array(jax.jit(jax.vmap(lambda key: erase(key, image, settings)))(keys(number)))
    changed = (erased != 9).all(-1)
    noise = erased[changed]
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.02
    area = changed.mean((1, 2))
    assert area.min() > 0.02 * 0.8 and 0.31 < area.max() < 0.35 and abs(area.mean() - (0.02 + 1 / 3) / 2) < 0.02
    with pytest.raises(InputError, match=r"^data.augment.erase_area=\(0.4, 0.2\): give the smallest share"):
        AugmentConfig(erase_area=(0.4, 0.2))


@pytest.mark.slow
def test_the_order_is_crop_cutout_normalize_erase():
    # The black pixels of the crop and of cutout are normalized; the zeros of erasing are not.
    batch = random_batch(64)._replace(image=np.full((64, 6, 6, 3), 200, np.uint8))
    settings = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    black, plain = -2.0, (200 / 255 - 0.5) / 0.25
    images = images_of(batch, AugmentConfig(pad=2, cutout=2, erase=0.8), **settings)
    assert np.abs(np.unique(images.round(4)) - [black, 0, plain]).max() < 1e-4


@pytest.mark.slow
def test_augmentation_depends_on_the_example_and_not_on_its_place_in_the_batch():
    batch = random_batch(32, image=12)
    shuffled = np.random.default_rng(1).permutation(32)
    images = images_of(batch, PER_IMAGE)
    assert (images[shuffled] == images_of(jax.tree.map(lambda column: column[shuffled], batch), PER_IMAGE)).all()
    for other in (batch._replace(epoch=batch.epoch + 1), batch._replace(row=batch.row + 1)):
        assert (images != images_of(other, PER_IMAGE)).any((1, 2, 3)).mean() > 0.9
    flips = [images_of(batch, AugmentConfig(), seed=seed) for seed in (0, 1)]
    assert (flips[0] != flips[1]).any()


def test_random_draws_of_an_augmentation_do_not_depend_on_the_others():
    # A flip alone does not change these images, because each is its own mirror image.
    batch = random_batch(32, image=12)
    batch = batch._replace(image=np.maximum(batch.image, batch.image[:, :, ::-1]))
    assert (images_of(batch, PER_IMAGE) == images_of(batch, dataclasses.replace(PER_IMAGE, flip=False))).all()


def test_evaluation_is_only_normalized_and_in_float32():
    batch = random_batch(7)
    plain = Preprocess(augment=AugmentConfig(flip=False))(batch, train=False)
    augmented = Preprocess(augment=EVERYTHING, dtype=jnp.bfloat16)(batch, train=False)
    assert plain.mixing is augmented.mixing is None
    assert (plain.images.astype(jnp.bfloat16) == augmented.images).all()


def test_further_augmentations_are_of_pixels_and_run_in_their_order():
    """The order is `then`, normalization, `extra`, mixing. `extra` sets the first row to 9, and so have mixtures."""
    batch = random_batch(64)
    plain = images_of(batch, AugmentConfig(flip=False), **PLAIN)
    images = images_of(batch, AugmentConfig(flip=False, then=("vertical_flip",)), **PLAIN)
    unflipped = (images == plain).all((1, 2, 3))
    assert (images[~unflipped] == plain[~unflipped][:, ::-1]).all() and 16 < unflipped.sum() < 48
    augment = AugmentConfig(flip=False, then=("vertical_flip",))
    preprocess = Preprocess(augment=augment, extra=lambda key, image: image.at[0].set(9), **PLAIN)
    assert (np.array(inputs_of(batch, preprocess).images)[:, 0] == 9).all()
    with_mixup = dataclasses.replace(preprocess, augment=dataclasses.replace(preprocess.augment, mixup=0.5))
    images = np.array(inputs_of(batch, with_mixup).images)
    assert np.abs(images[:, 0] - 9).max() < 1e-5 and (images[:, 1:].round(2) % 1 != 0).any()


@pytest.mark.slow
def test_each_application_of_an_augmentation_has_its_own_random_key():
    batch = random_batch(64)

    def is_flipped(*then: str) -> np.ndarray:
        pixels = images_of(batch, AugmentConfig(flip=False, then=then), **PLAIN)
        return (pixels.mean(-1) != images_of(batch, AugmentConfig(flip=False), **PLAIN).mean(-1)).any((1, 2))

    once, twice = is_flipped("vertical_flip"), is_flipped("vertical_flip", "vertical_flip")
    # The second flip has its own random draws, so it flips other images than the first.
    second = once ^ twice
    assert 16 < second.sum() < 48 and (second != once).any()
    gray = images_of(batch, AugmentConfig(flip=False, then=("grayscale",)), **PLAIN)
    between = AugmentConfig(flip=False, then=("vertical_flip", "grayscale", "vertical_flip"))
    assert (np.where(twice[:, None, None, None], gray[:, ::-1], gray) == images_of(batch, between, **PLAIN)).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grayscale_replaces_a_fifth_of_the_images_by_weighted_channels(dtype):
    image, number = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (5, 4, 3), dtype, endpoint=True), 2000
    image[0] = np.iinfo(dtype).max
    gray = np.floor(image @ np.array([0.299, 0.587, 0.114]) + 0.5)[..., None]
    augmented = np.array(jax.jit(jax.vmap(lambda key: grayscale(key, jnp.array(image))))(keys(number)))
    assert augmented.dtype == dtype
    is_gray = (np.ptp(augmented, -1) == 0).all((1, 2))
    assert np.abs(augmented[is_gray].astype(float) - gray).max() <= 1 and (augmented[~is_gray] == image).all()
    if dtype == np.uint8:
        # torchvision's Grayscale of a picture is Pillow's conversion.
        np.testing.assert_array_equal(augmented[is_gray][0][..., 0], np.asarray(Image.fromarray(image).convert("L")))
    assert abs(is_gray.sum() - 0.2 * number) < 5 * np.sqrt(number * 0.16)
    assert grayscale(keys(1)[0], jnp.array(image[..., :1])).shape == (5, 4, 1)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda key, image: image[:3], "returned float32[3,6,3] for an image float32[6,6,3]; return the same shape"),
        (lambda image: image, "failed for an image float32[6,6,3] (TypeError: "),
        (lambda key, image: image if image.sum() > 0 else -image, "(TracerBoolConversionError: "),
    ],
)
def test_an_unusable_augmentation_function_raises_a_one_line_error(extra, message):
    line = error_line(check_augmentation, Preprocess(extra=extra), (6, 6, 3))
    assert line.startswith("augmentation: ") and message in line


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ({"pad": 7}, "pad=7: expected 0 to 6 pixels"),
        ({"cutout": 7}, "cutout=7: expected 0 to 6"),
        ({"erase": float("nan")}, "erase=nan: expected 0 to 1"),
        ({"then": ("grayscal",)}, "then='grayscal' is unknown; did you mean 'grayscale'. there"),
        ({"then": ("grayscale", "cutout")}, "then='cutout' is unknown; .*there are: area_crop"),
        ({"then": ("grayscale", "mixup")}, "then='mixup' is unknown; .*there are: area_crop"),
    ],
)
def test_an_error_names_an_unusable_value(augment, message):
    with pytest.raises(InputError, match=rf"^data\.augment\.{message}"):
        prepared(**augment)


def test_grayscale_needs_1_or_3_channels():
    rng = np.random.default_rng(0)
    table = ArrayTable(rng.integers(0, 256, (20, 6, 6, 2), np.uint8), np.arange(20) % 5, tuple("abcde"))
    with pytest.raises(InputError, match=r"^grayscale needs pixels with 1 or 3 channels, and not uint8"):
        prepared(table=table, then=("grayscale",))


def test_gray_pixels_stay_gray_under_the_default_normalization():
    """Grayscale of normalized values would give the channels of (128, 128, 128) different means."""
    batch = random_batch(64)._replace(image=np.full((64, 6, 6, 3), 128, np.uint8))
    gray = images_of(batch, AugmentConfig(flip=False, then=("grayscale",)))
    np.testing.assert_array_equal(gray, images_of(batch, AugmentConfig(flip=False)))
    with pytest.raises(InputError, match="^grayscale needs pixels with 1 or 3 channels, and not float32"):
        check_augmentation(Preprocess(augment=AugmentConfig(then=("grayscale",))), (6, 6, 3), np.float32)


def prepared(batch_size: int = 8, devices: int = 2, table: ArrayTable | None = None, **augment):
    table = table or random_table(20)
    data = DataConfig(augment=AugmentConfig(**augment))
    return setup_of(linear_model(), sgd(0.1), table, devices=devices, data=data, batch_size=batch_size)


@pytest.mark.parametrize(("key", "value"), [("mixup", 0.2), ("cutmix", 1.0)])
def test_mixing_needs_pairs_in_each_part(key, value):
    prepared(batch_size=8, devices=2, **{key: value})
    assert error_line(prepared, batch_size=6, devices=2, **{key: value}) == (
        f"data.augment.{key}={value} mixes pairs of images within a part of the batch, but train.batch_size=6 makes "
        "2 parts of 3, an odd number; a batch of 4 or 8 would do"
    )
    with pytest.raises(InputError, match="makes 4 parts of 1, an odd number; a batch of 8 would do"):
        prepared(batch_size=4, devices=4, **{key: value})
    prepared(batch_size=6, devices=2, flip=True)
