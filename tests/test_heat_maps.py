"""Heat maps of Grad-CAM: their values, the same on any number of devices, and the files and figures with them."""

import csv
import dataclasses
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from PIL import Image
from small_recipe import SmallNet
from support.data import random_table
from support.errors import error_line
from support.networks import linear_model, randomized
from support.trained import random_run

from jaxddp.data.opening import open_inputs
from jaxddp.engine.predictions import grad_cam
from jaxddp.inference.output_files import heat_map_path, write_predictions
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.activations import LayerCall, activation, heat_map_layer
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import ARCHITECTURES, ResNet
from jaxddp.models.vit import ViT, ViTSize
from jaxddp.training.pictures import heat_map_over

TABLE = random_table(70, image=8)
NET = SmallNet(width=3)


def maps_of(model, layer, params, state, images, classes, devices: int = 1) -> np.ndarray:
    def local(params, state, images, classes):
        return grad_cam(model, layer, params, state, images, classes)

    mesh = Topology.create(devices).mesh
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P(AXIS), P(AXIS)), out_specs=P(AXIS))
    return np.asarray(jax.jit(mapped)(params, state, images, classes))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_before_a_global_mean_and_a_dense_head_grad_cam_equals_cam(devices):
    """CAM (Zhou et al. 2016, arXiv:1512.04150): the class's weights times the feature map, here divided by its pixels.

    On several devices the gradient would be too large if it were summed over them.
    """
    with jax.enable_x64(True):
        module = ResNet(ARCHITECTURES["resnet10"], 5, 2, "small", dtype="float64", param_dtype="float64")
        model, images = adapt(module), jax.random.normal(jax.random.key(1), (4, 16, 16, 3), "float64")
        params, state = jax.jit(model.init)(jax.random.key(0), images[:1])
        params, classes = randomized(params), jnp.array([0, 4, 2, 2])
        layer = heat_map_layer(model, (16, 16, 3))
        assert layer == LayerCall("layer4_0", (2, 2, 16))
        _, features = jax.jit(lambda *a: activation(model, layer, *a))(params, state, images)
        cam = np.einsum("bhwc,bc->bhw", features, params["fc"]["kernel"][:, classes].T) / 4
        maps = maps_of(model, layer, params, state, images, classes, devices)
        assert np.abs(cam).max() > 0.01 and np.abs(maps - cam).max() < 1e-9 * np.abs(cam).max()


@pytest.mark.ci
def test_tokens_after_the_class_token_are_the_pixels_of_a_map():
    """Images of 2x3 patches. The gradient is compared with a difference of logits."""
    with jax.enable_x64(True):
        model = adapt(ViT(ViTSize(8, 2, blocks=2, patch=4), 5, dtype="float64", param_dtype="float64"))
        images, classes = jax.random.normal(jax.random.key(1), (2, 8, 12, 3), "float64"), jnp.array([1, 3])
        params, state = jax.jit(model.init)(jax.random.key(0), images[:1])
        params = jax.tree.map(lambda leaf: leaf + 0.3, randomized(params))
        layer = heat_map_layer(model, (8, 12, 3))
        assert layer == LayerCall("blocks_1/norm1", (7, 8))
        maps = maps_of(model, layer, params, state, images, classes)
        logits = jax.jit(lambda change: activation(model, layer, params, state, images, change))
        zero, step = jnp.zeros((2, 7, 8)), 1e-4
        tokens = np.asarray(logits(zero)[1])
        gradient = np.zeros((2, 6, 8))
        for token in range(6):
            for channel in range(8):
                change = zero.at[:, 1 + token, channel].set(step)
                difference = logits(change)[0] - logits(-change)[0]
                gradient[:, token, channel] = np.take_along_axis(difference, classes[:, None], 1)[:, 0] / (2 * step)
        expected = (tokens[:, 1:] * gradient.mean(1, keepdims=True)).sum(-1).reshape(2, 2, 3)
        assert np.abs(expected).max() > 1e-4 and np.allclose(maps, expected, rtol=1e-6, atol=1e-9)


def explained(devices: int, at_once: int, **config) -> list[np.ndarray]:
    run = random_run(NET, 8, devices=devices, **config)
    batches = [batch.values for batch in run.explained_stream(run.source(TABLE.images), at_once)]
    return [np.concatenate(values) for values in zip(*batches, strict=True)]


@pytest.mark.slow
def test_heat_maps_do_not_depend_on_devices_and_batches():
    probabilities, maps, images = explained(1, 16)
    assert maps.shape == (70, 8, 8) and maps.min() >= 0 and maps.max() > 0
    assert np.array_equal(images, TABLE.images)
    assert np.allclose(probabilities, random_run(NET, 8).predict(TABLE.images).probabilities, atol=1e-6)
    for devices, at_once in ((4, 16), (2, 8)):
        others = explained(devices, at_once)
        for one, other in zip(others[:2], (probabilities, maps), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.array_equal(explained(4, 16)[1], maps)


@pytest.mark.slow
def test_negative_values_of_a_map_are_shown_as_zero():
    run = random_run(NET, 8)
    layer = {"kernel": run.state.params["Conv_0"]["kernel"], "bias": run.state.params["Conv_0"]["bias"] - 1.5}
    run = dataclasses.replace(run, state=run.state.replace(params={**run.state.params, "Conv_0": layer}))
    probabilities, maps, _ = next(iter(run.explained_stream(run.source(TABLE.images), 70))).values
    # The map of this layer has the size of the images.
    images = ((TABLE.images / 255 - np.array(run.preprocess.mean)) / np.array(run.preprocess.std)).astype(np.float32)
    layer = heat_map_layer(run.model, (8, 8, 3))
    raw = maps_of(run.model, layer, run.state.params, {}, images, probabilities.argmax(1))
    assert raw.min() < -0.001 and raw.max() > 0.001
    assert np.allclose(maps, np.maximum(raw, 0), rtol=1e-4, atol=1e-6)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(5)(images.reshape(len(images), -1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (linear_model(), "whose layers cannot be read; give a Linen or NNX module"),
        (Dense(), "explain: no layer of the network has an output [B, H, W, C], which a heat map needs"),
    ],
    ids=["functions", "dense"],
)
def test_a_network_without_maps_is_refused(model, message):
    assert message in error_line(heat_map_layer, adapt(model), (8, 8, 3))


def test_a_heat_map_is_bright_where_it_is_large_and_dark_without_a_positive_value():
    image, heat = np.full((2, 2, 3), 100, np.uint8), np.array([[0, 1], [0.5, 0]])
    picture = heat_map_over(image, heat)
    assert picture.shape == (2, 2, 3) and picture.dtype == np.uint8
    brightness = picture.astype(int).sum(-1)
    assert brightness[0, 1] > brightness[1, 0] > brightness[0, 0] == brightness[1, 1]
    assert np.array_equal(picture, heat_map_over(image, 7 * heat))
    dark = heat_map_over(image, np.zeros((2, 2)))
    assert (dark == dark[0, 0]).all() and np.array_equal(dark[0, 0], picture[0, 0])
    for channels in (1, 2, 4, 5):
        assert heat_map_over(np.full((2, 2, channels), 100, np.uint8), heat).shape == (2, 2, 3)


def test_names_of_files_are_safe_and_distinct(tmp_path):
    ids = ["../../etc/passwd", "a/b.jpg", "a_b.jpg", "ä" * 300, "x" * 300, "", "con\n"]
    names = [heat_map_path(tmp_path, 1000, row, image_id).name for row, image_id in enumerate(ids)]
    assert len({*names}) == len(ids)
    assert {heat_map_path(tmp_path, 1000, 0, image_id).parent for image_id in ids} == {tmp_path}
    assert all(name.isascii() and len(name) < 120 and not {*name} & {*"/\\\n ."[:4]} for name in names)
    assert names[1] == "001-a_b_jpg.png"


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for row in range(70):
        Image.fromarray(TABLE.images[row]).save(folder / f"{row:02d}.png")
    (folder / "33.png").write_text("no picture")
    return folder


@pytest.mark.slow
def test_predictions_write_a_picture_of_each_usable_image_and_continue(photos, tmp_path):
    run, table, folder, out = random_run(NET, 8), open_inputs([photos]), tmp_path / "maps", tmp_path / "out.csv"

    def stop(done: int, errors: int) -> None:
        raise KeyboardInterrupt

    # Predictions with other settings are not continued.
    folders, unsure, sets = {"explain": tmp_path / "other"}, {"min_confidence": 0.9}, {"set_threshold": 0.5}
    for settings in (folders, {}, unsure, {}, sets, {"set_threshold": 0.6}, {}):
        with pytest.raises(KeyboardInterrupt):
            write_predictions(run, table, out, "csv", **{"explain": folder, **settings}, progress=stop)
    assert len([*folder.iterdir()]) == 63
    done = list[int]()
    write_predictions(run, table, out, "csv", explain=folder, progress=lambda count, errors: done.append(count))
    assert done == [70]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{row:02d}-{row:02d}_png.png" for row in range(70) if row != 33]
    # The predictions are those without heat maps.
    plain = tmp_path / "plain.csv"
    write_predictions(run, table, plain, "csv")
    rows, expected = (list(csv.DictReader(path.read_text().splitlines())) for path in (out, plain))
    assert [row["class"] for row in rows] == [row["class"] for row in expected] and rows[33]["error"]
    _, maps, images = next(iter(run.explained_stream(table, 64))).values
    assert np.array_equal(np.asarray(Image.open(folder / names[5])), heat_map_over(images[5], maps[5]))
