"""Weights for images of another size or with other channels are converted when they are read."""

import jax
import numpy as np
import pytest
import safetensors.numpy
from support.data import CLASSES, random_table
from support.networks import SmallNet, state_dict_of
from support.published import golden_positions, positions
from support.shared import adapted, sgd

from jaxddp.api import prepare_training, train
from jaxddp.data.arrays import ArrayTable
from jaxddp.inference.exports import write_weights
from jaxddp.losses import softmax_cross_entropy
from jaxddp.models.interface import shapes_of
from jaxddp.models.network import PositionGrid
from jaxddp.models.swin import Swin
from jaxddp.models.vit import ViT, ViTSize
from jaxddp.weights.match import ImageArrays, conversions, match, namings_of
from jaxddp.weights.state_dict import read, write

KERNEL, TABLE = "params/conv/kernel", "params/pos_embed"


def small_vit():
    return ViT(ViTSize(8, 2, blocks=1, patch=4), CLASSES)


def grid(text: str) -> PositionGrid:
    return PositionGrid(*map(int, text.split("x")))


def converted(shape, array, images: ImageArrays, path=KERNEL):
    """Return an array for a shape, and the description of its conversion; None if there is none."""
    found = conversions({path: shape}, {path: array}, images)
    return (found[path].convert(array), found[path].description) if path in found else None


@pytest.mark.parametrize("grids", golden_positions())
def test_position_embeddings_are_interpolated_as_timm_interpolates_them(grids):
    old, new = grids.split(" to ")
    table, expected = positions(old), np.array(golden_positions()[grids])
    images = ImageArrays(3, {TABLE: grid(new)}, {TABLE: grid(old)})
    result, description = converted(expected.shape, table, images, TABLE)
    assert description == f"interpolated from {old} patches to {new}"
    np.testing.assert_array_equal(result[:, 0], table[:, 0].astype(np.float32))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)


def test_a_grid_that_is_not_known_is_square():
    table = np.zeros((1, 17, 8))
    images = ImageArrays(3, {TABLE: grid("2x3")})
    assert converted((1, 7, 8), table, images, TABLE)[1] == "interpolated from 4x4 patches to 2x3"
    run = ImageArrays.of(small_vit(), (8, 12, 3), stored_shape=(8, 32, 3))
    assert converted((1, 7, 8), table, run, TABLE)[1] == "interpolated from 2x8 patches to 2x3"


@pytest.mark.parametrize(
    ("stored", "channels", "factors"),
    [
        (3, 1, [[1], [1], [1]]),
        (3, 2, 1.5 * np.eye(3, 2)),
        (3, 4, 0.75 * np.eye(3)[:, [0, 1, 2, 0]]),
        (3, 7, 3 / 7 * np.eye(3)[:, [0, 1, 2, 0, 1, 2, 0]]),
        (1, 3, np.full((1, 3), 1 / 3)),
    ],
)
def test_channels_are_converted_by_the_rule_of_timm(stored, channels, factors):
    kernel = np.random.default_rng(0).standard_normal((2, 2, stored, 5))
    result, _ = converted((2, 2, channels, 5), kernel, ImageArrays(channels))
    np.testing.assert_allclose(result, np.einsum("hwcf,cd->hwdf", kernel, factors), rtol=1e-14)


NOT_CONVERTED = {
    "12 patches": (TABLE, (1, 13, 8), (1, 7, 8), 3),
    "another width": (TABLE, (1, 17, 4), (1, 7, 8), 3),
    "no patches": (TABLE, (1, 1, 8), (1, 7, 8), 3),
    "no axis of images": (TABLE, (17, 8), (1, 7, 8), 3),
    "four channels": (KERNEL, (3, 3, 4, 8), (3, 3, 3, 8), 3),
    "not of images": (KERNEL, (3, 3, 3, 8), (3, 3, 6, 8), 1),
    "another side": (KERNEL, (3, 3, 3, 8), (5, 5, 1, 8), 1),
    "other features": (KERNEL, (2, 2, 3, 24), (2, 2, 1, 8), 1),
}


@pytest.mark.parametrize("case", NOT_CONVERTED)
def test_other_arrays_are_not_converted(case):
    path, stored, shape, channels = NOT_CONVERTED[case]
    assert converted(shape, np.zeros(stored), ImageArrays(channels, {TABLE: grid("2x3")}), path) is None
    # Nor are several kernels with other channels: their inputs are not images.
    paths = (KERNEL, "params/layer1/kernel")
    shapes, arrays = dict.fromkeys(paths, (3, 3, 1, 8)), dict.fromkeys(paths, np.zeros((3, 3, 3, 8)))
    assert conversions(shapes, arrays, ImageArrays(1)) == {}


@pytest.mark.slow
def test_a_training_converts_weights_and_logs_the_conversions(tmp_path, caplog):
    arrays = state_dict_of(adapted(small_vit()), (16, 16, 3))
    write(tmp_path / "w.safetensors", arrays)
    table = random_table(20, image=24)
    table = ArrayTable(table.images[..., :1], table.labels, table.class_names)
    setup = prepare_training(small_vit(), table, 1, sgd(0.1), 4, weights=tmp_path / "w.safetensors")
    assert setup.state.params["pos_embed"].shape == (1, 37, 8)
    kernel, actual = arrays["patch_embed.proj.weight"], setup.state.params["patch_embed"]["kernel"]
    np.testing.assert_allclose(actual, kernel.sum(1, keepdims=True).transpose(2, 3, 1, 0), rtol=1e-5)
    assert caplog.messages == [
        f"{tmp_path / 'w.safetensors'}: 20 of the network's 20 arrays; converted: params/patch_embed/kernel (the sum "
        "of its 3 channels, for gray images), params/pos_embed (interpolated from 4x4 patches to 6x6)"
    ]


@pytest.mark.ci
def test_the_grid_of_a_runs_position_embeddings_follows_from_its_images(tmp_path, caplog):
    table, model = random_table(8, image=16), small_vit()
    wide = ArrayTable(table.images[:, :8], table.labels, table.class_names)
    setup = prepare_training(model, wide, 1, sgd(0.1), 4, epochs=1)
    state, _ = train(softmax_cross_entropy, setup, workdir=tmp_path / "w", listeners=(), save_every="1 epoch")
    again = prepare_training(model, table, 1, sgd(0.1), 4, weights=tmp_path / "w")
    assert again.state.params["pos_embed"].shape == (1, 17, 8)
    assert "params/pos_embed (interpolated from 2x4 patches to 4x4)" in caplog.text
    np.testing.assert_array_equal(again.state.params["pos_embed"][:, 0], state.params["pos_embed"][:, 0])


def test_the_indices_of_swin_are_exported_and_not_read(tmp_path):
    model, file = adapted(Swin((1, 2), CLASSES, width=32)), tmp_path / "w.safetensors"
    with jax.numpy_rank_promotion("raise"):
        arrays = {path: np.zeros(shape, np.float32) for path, shape in shapes_of(model, (32, 32, 3)).items()}
    assert write_weights(file, model, arrays) == len(arrays) + 3
    stored = safetensors.numpy.load_file(file)
    for block in ("features.1.0", "features.3.0", "features.3.1"):
        index = stored[f"{block}.attn.relative_position_index"]
        assert index.dtype == np.int64 and index.shape == (49 * 49,)
        down, right = (part.reshape(7, 7, 7, 7) - 6 for part in np.divmod(index, 13))
        at = np.arange(7)
        np.testing.assert_array_equal(down, np.broadcast_to((at[:, None] - at)[:, None, :, None], down.shape))
        np.testing.assert_array_equal(right, np.broadcast_to((at[:, None] - at)[None, :, None, :], right.shape))
    matched = match(shapes_of(model, (32, 32, 3)), read(file), namings_of(model), CLASSES)
    assert matched.left_over == () and len(matched.arrays) == len(arrays)
    assert write_weights(file, model, arrays, library="timm") == len(arrays) and "head.fc.bias" in read(file)
    assert namings_of(adapted(SmallNet()), "timm") == ()  # It is an error.
