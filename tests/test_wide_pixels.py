"""Images of 16 bits and any number of channels keep their precision, in batches and in device memory."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from support.data import CLASSES, random_batch, random_table
from support.networks import linear_model
from support.runs import setup_of, train
from support.shared import sgd

import jaxddp.training.pictures as pictures
from jaxddp.augment.geometry import Side
from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import examine
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.opening import open_tables
from jaxddp.data.source import Source
from jaxddp.models.airbench import patch_moments

SIZE, COUNT = 6, 20
PLAIN = DataConfig(image_size=SIZE, crop="whole", mean=(0.5,), std=(0.25,), augment=AugmentConfig(flip=False))


def table(channels: int = 3, dtype: type = np.uint16) -> ArrayTable:
    rng = np.random.default_rng(channels)
    images = rng.integers(0, np.iinfo(dtype).max, (COUNT, SIZE, SIZE, channels), dtype, endpoint=True)
    return ArrayTable(images, np.arange(COUNT) % CLASSES, tuple("abcde"))


def widened(source: ArrayTable) -> ArrayTable:
    """Return the same images in 16 bits: 255 becomes 65535."""
    return ArrayTable(source.images.astype(np.uint16) * 257, source.labels, source.class_names)


def inputs(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    batch = random_batch(len(images))._replace(image=images)
    return np.asarray(Preprocess(mean, std)(batch, train=False).images)


def test_every_value_of_sixteen_bits_gives_a_different_input():
    values = np.arange(65536, dtype=np.uint16).reshape(4, 128, 128, 1)
    actual = inputs(values, (0.5,), (0.25,))
    assert actual.dtype == np.float32 and len(np.unique(actual)) == 65536
    np.testing.assert_allclose(actual, (values / 65535 - 0.5) / 0.25, atol=2e-7, rtol=1e-6)


@pytest.mark.parametrize("side", [None, 5])
def test_normalized_floats_give_the_same_inputs_as_their_pixels(side: int | None):
    """`side` is the size of images that grow; the resize rounds pixels, but not floats."""
    images = table(dtype=np.uint8).images[:8]
    mean, std = (0.4, 0.5, 0.6), (0.2,) * 3
    preprocess = Preprocess(mean, std, AugmentConfig(mixup=0.3, cutmix=0.2))
    batch = random_batch(8)._replace(side=None if side is None else Side(side))
    normalized = ((images / 255 - mean) / std).astype(np.float32)
    expected, actual = (
        np.asarray(preprocess(batch._replace(image=one), train=True).images) for one in (images, normalized)
    )
    level = 1 / (255 * 0.2)
    np.testing.assert_allclose(actual, expected, atol=2e-6 if side is None else 0.6 * level)
    message = "data.augment.rand_augment=1: needs 8-bit pixels with 1 or 3 channels, and not float32.4,4,3.; give 0"
    with pytest.raises(InputError, match=message):
        check_augmentation(Preprocess(augment=AugmentConfig(rand_augment=1)), (4, 4, 3), np.float32)


@pytest.mark.parametrize("channels", [1, 5])
def test_a_single_mean_applies_to_all_channels(channels: int):
    images = table(channels, np.uint8).images[:8]
    single, repeated = (inputs(images, (0.4,) * times, (0.2,) * times) for times in (1, channels))
    np.testing.assert_array_equal(single, repeated)


def trained(source: Source, data: DataConfig) -> list[float]:
    """Return the sum of magnitudes of each array of the trained parameters."""
    setup = setup_of(linear_model(), sgd(0.1), source, data=data)
    state = train(setup, {"train": {"duration": "2 epochs"}})
    return [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(state.params)]


@pytest.mark.slow
def test_files_of_sixteen_bits_train_equally_from_batches_and_from_the_devices(tmp_path: Path):
    source = table(1)
    for row, label in enumerate(source.labels):
        (tmp_path / "abcde"[label]).mkdir(exist_ok=True)
        Image.fromarray(source.images[row, ..., 0]).save(tmp_path / "abcde"[label] / f"{row:02d}.tif")
    changes = {"path": str(tmp_path), "val_share": 0.3, "channels": 4, "bits": 16, "resize": SIZE}
    sums = {}
    for cache in ("none", "device"):
        data = dataclasses.replace(PLAIN, **changes, cache=cache)
        train_table, _ = open_tables(data)
        sums[cache] = trained(train_table, data)
    assert sums["none"] == sums["device"]


def test_whitening_has_the_same_patch_moments_in_sixteen_bits():
    source = random_table(8)
    narrow = patch_moments(source.images, 2, (0.5,), (0.25,))
    np.testing.assert_allclose(patch_moments(widened(source).images, 2, (0.5,), (0.25,)), narrow, rtol=1e-12)
    np.testing.assert_array_equal(patch_moments(source.images, 2, (0.5,) * 3, (0.25,) * 3), narrow)


@pytest.mark.parametrize(("dtype", "key", "value", "own"), [(np.uint16, "channels", 4, 3), (np.uint8, "bits", 16, 8)])
def test_an_error_names_fixed_properties_of_arrays(dtype: type, key: str, value: int, own: int):
    fault = f"^data.{key}={value}: images in memory are used as they are; set data.{key} {own}"
    with pytest.raises(InputError, match=fault):
        table(3, dtype).check(dataclasses.replace(PLAIN, **{"bits": 8, key: value}))


def test_settings_that_do_not_fit_the_pixels_raise_a_one_line_error():
    with pytest.raises(InputError, match="^data.augment.rand_augment=1: needs 8-bit pixels with 1 or 3 channels, and"):
        setup_of(linear_model(), sgd(0.1), table(3), data=DataConfig(augment=AugmentConfig(rand_augment=1)))
    with pytest.raises(InputError, match="5 channels; give a value for each channel, or one for all"):
        setup_of(linear_model(), sgd(0.1), table(5), data=DataConfig())
    setup = setup_of(linear_model(), sgd(0.1), table(3), data=PLAIN)
    message = "^validation data: pixels of uint8, and pixels of uint16 in the training data"
    with pytest.raises(InputError, match=message):
        setup.evaluator(table(3, np.uint8))
    with pytest.raises(InputError, match="^images of >u2: give uint8"):
        ArrayTable(np.zeros((1, 2, 2, 1), ">u2"), np.zeros(1, int), ("a",))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_check_and_pictures_take_any_channels_and_bits(channels: int):
    source = table(channels)
    findings = examine(source, 0)
    assert (findings.kind, findings.height, findings.mode) == ("array", SIZE, str(channels))
    assert findings.size == SIZE * SIZE * channels * 2
    assert pictures.png(pictures.input_grid(source.images[:2], ["$1_$2", "b"])).startswith(b"\x89PNG")
