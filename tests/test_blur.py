"""Blur before strided convolutions: its values and gradients, its use in ResNets, and equality on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.cases import rare_case
from support.data import CLASSES, random_batch
from support.networks import largest_difference, objective_of, randomized, train_steps
from support.shared import topology_of

from jaxddp.engine.ways.way import Way
from jaxddp.models.ops.layers import Operations
from jaxddp.models.resnet import BASIC, BOTTLENECK, Architecture, ResNet, blur


def blurred(images: np.ndarray, stride: int) -> np.ndarray:
    """Blur pixel by pixel, in float64."""
    weights = np.outer([1, 2, 1], [1, 2, 1]) / 16
    padded = np.pad(images.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = range(0, images.shape[1], stride), range(0, images.shape[2], stride)
    pixels = [np.einsum("bijc,ij->bc", padded[:, i : i + 3, j : j + 3], weights) for i in rows for j in columns]
    return np.stack(pixels, 1).reshape(len(images), len(rows), len(columns), -1)


@pytest.mark.parametrize(("sides", "stride"), [((7, 8), 2), ((1, 5), 3), rare_case((9, 4), 1), rare_case((8, 8), 2)])
def test_blur_convolves_with_the_binomial_filter_and_its_gradient_is_the_transpose(sides, stride):
    with jax.enable_x64(True):
        rng = np.random.default_rng(stride)
        images = rng.normal(size=(2, *sides, 3))
        actual, transpose = jax.vjp(lambda x: blur(x, stride), jnp.asarray(images))
        expected = blurred(images, stride)
        assert actual.dtype == jnp.float64
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
        cotangents = rng.normal(size=expected.shape)
        (gradient,) = transpose(jnp.asarray(cotangents))
        other = rng.normal(size=images.shape)
        assert gradient.shape == images.shape
        # <blur(other), cotangents> = <other, transpose(cotangents)> for any other image.
        np.testing.assert_allclose((blurred(other, stride) * cotangents).sum(), (other * gradient).sum(), atol=1e-12)


@pytest.mark.parametrize(("dtype", "stride"), [("bfloat16", 2), rare_case("float16", 2), rare_case("bfloat16", 1)])
def test_blur_rounds_only_once_in_half_precision(dtype, stride):
    rng = np.random.default_rng(0)
    images, cotangents = (jnp.asarray(rng.integers(-128, 129, (2, side, side, 3)), dtype) for side in (8, 8 // stride))
    actual, transpose = jax.vjp(lambda x: blur(x, stride), images)
    np.testing.assert_array_equal(actual, jnp.asarray(blurred(np.asarray(images), stride), dtype))
    upsampled = np.zeros((2, 8, 8, 3))
    upsampled[:, ::stride, ::stride] = np.asarray(cotangents, np.float64)
    np.testing.assert_array_equal(transpose(cotangents)[0], jnp.asarray(blurred(upsampled, 1), dtype))
    assert actual.dtype == transpose(cotangents)[0].dtype == dtype


SHAPES = {
    "basic": Architecture((1, 1, 1), BASIC),
    "bottleneck": Architecture((1, 1), BOTTLENECK),
    "two blocks": Architecture((1, 1), BASIC),
}


def network(kind: str, *, stem="small", width: int = 16, **settings) -> ResNet:
    settings = {"dtype": jnp.float64, "param_dtype": jnp.float64} | settings
    return ResNet(SHAPES[kind], CLASSES, width=width, stem=stem, **settings)


def blurred_convolution(images, kernel, stride, padding):
    # FFCV blurs at a stride above 1 and 16 or more channels.
    if stride > 1 and images.shape[-1] >= 16:
        filters = jnp.asarray(np.outer([1, 2, 1], [1, 2, 1]) / 16, images.dtype)[:, :, None, None]
        filters = jnp.broadcast_to(filters, (3, 3, 1, images.shape[-1]))
        images = plain_convolution(images, filters, 1, 1, feature_group_count=images.shape[-1])
    return plain_convolution(images, kernel, stride, padding)


def plain_convolution(images, kernel, stride, padding, **options):
    margins = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), margins, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "side"), [("bottleneck", 8), rare_case("basic", 13)])
def test_a_resnet_blurs_before_each_strided_convolution_of_sixteen_or_more_channels(kind, side):
    with jax.enable_x64(True):
        images = jnp.asarray(np.random.default_rng(0).normal(size=(2, side, side, 3)))
        plain, expected = (
            network(kind, operations=Operations(convolution, custom_norm_gradient=False))
            for convolution in (plain_convolution, blurred_convolution)
        )
        variables = jax.jit(plain.init)(jax.random.key(0), images)
        variables = {**variables, "params": randomized(variables["params"])}
        ours = network(kind, blur_pool=True)
        shapes = jax.eval_shape(ours.init, jax.random.key(0), images)
        assert jax.tree.structure(shapes) == jax.tree.structure(variables)
        outputs = [jax.jit(net.apply)(variables, images) for net in (ours, expected, plain)]
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-12)
        assert np.abs(outputs[0] - outputs[2]).max() > 1e-3


@pytest.mark.parametrize(("width", "blurred_widths"), [(8, [16]), (16, [16, 32])])
def test_the_stem_and_narrow_images_are_not_blurred(width, blurred_widths, monkeypatch):
    blurred_channels, images = [], jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    monkeypatch.setattr(
        "jaxddp.models.resnet.blur", lambda x, stride=1: blurred_channels.append(x.shape[-1]) or blur(x, stride)
    )
    net = network("basic", blur_pool=True, width=width, stem="imagenet", dtype="float32", param_dtype="float32")
    jax.eval_shape(net.init, jax.random.key(0), images)
    # A block blurs before its strided convolution, and before the strided convolution of its shortcut.
    assert blurred_channels == sorted(2 * blurred_widths)


@functools.cache
def trained(devices: int):
    """Return parameters and losses of two steps of plain SGD in float64, with statistics of the whole batch."""
    objective = objective_of(network("two blocks", blur_pool=True, axis_name="data"))
    batches = [random_batch(8, seed=number, image=8) for number in range(2)]
    params, sums, after = train_steps(objective, Way(topology_of(devices)), batches, image=8)
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), params[0], after.params)
    assert min(jax.tree.leaves(changes)) > 1e-9
    return after.params, after.model_state, [each.means() for each in sums]


@pytest.mark.slow
def test_four_devices_train_the_same_blurred_network_as_one():
    with jax.enable_x64(True):
        assert largest_difference(trained(4), trained(1)) < 1e-9
