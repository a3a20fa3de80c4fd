"""Convolutions: whichever way a platform takes, they are XLA's own; and no network of configs/ takes a slow one."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxddp.config import config_names, load
from jaxddp.models.adapt import adapt
from jaxddp.models.convolution import convolve
from jaxddp.models.resnet import resnet

KERNELS = st.sampled_from([(1, 0), (3, 1), (3, 0), (7, 3), (5, 2)])


@pytest.fixture(autouse=True)
def float64(quick_compile):
    with jax.enable_x64(True):
        yield


def by_xla(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    margins = [(padding, padding)] * 2
    return lax.conv_general_dilated(images, kernel, (stride,) * 2, margins, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def value_and_gradients(
    convolution: Callable, images: jax.Array, kernel: jax.Array, stride: int, padding: int
) -> tuple:
    value, gradient = jax.vjp(lambda x, k: convolution(x, k, stride, padding), images, kernel)
    return value, *gradient(jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape))


def assert_same(images: np.ndarray, kernel: np.ndarray, stride: int, padding: int) -> None:
    """Values and both gradients."""
    results = []
    for convolution in (convolve, by_xla):
        results.append(value_and_gradients(convolution, images, kernel, stride, padding))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def arrays(batch: int, height: int, width: int, channels: int, features: int, size: int) -> tuple:
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, height, width, channels)), rng.normal(size=(size, size, channels, features))


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 5),
    height=st.integers(2, 33),
    width=st.integers(2, 9),
    channels=st.integers(1, 4),
    features=st.integers(1, 4),
    kernel=KERNELS,
    stride=st.integers(1, 3),
)
def test_values_and_gradients_are_those_of_xla(batch, height, width, channels, features, kernel, stride):
    size, padding = kernel
    if min(height, width) + 2 * padding >= size:
        assert_same(*arrays(batch, height, width, channels, features, size), stride, padding)


@pytest.mark.parametrize(
    ("batch", "side", "channels", "features", "stride"),
    [
        pytest.param(2, 4, 256, 256, 1, id="many features on both sides"),
        pytest.param(2, 4, 4, 256, 2, id="many features of the output"),
        pytest.param(2, 5, 256, 4, 1, id="many features of the input"),
        pytest.param(3, 16, 128, 512, 1, id="several blocks, a large kernel"),
        pytest.param(6, 8, 3, 5, 1, id="several images a block"),
        pytest.param(7, 8, 3, 5, 2, id="a batch that blocks cannot divide"),
    ],
)
def test_each_way_gives_the_same(batch, side, channels, features, stride):
    assert_same(*arrays(batch, side, side, channels, features, 3), stride, 1)


def test_half_precision_is_summed_in_float32():
    # 4096 ones summed in bfloat16 stop at 256.
    images, kernel = jnp.ones((1, 64, 64, 1), jnp.bfloat16), jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    gradient = jax.grad(lambda k: convolve(images, k, 1, 0).astype(jnp.float32).sum())(kernel)
    assert gradient.dtype == jnp.bfloat16 and float(gradient[0, 0, 0, 0]) == 4096


def slow_operations(program: str) -> list[str]:
    """Those of a lowered CPU program that `jaxddp.models.convolution` avoids, and max-pool's gradient."""
    found = ["select_and_scatter"] * program.count("stablehlo.select_and_scatter")
    pattern = r"stablehlo\.convolution.*: \(tensor<(\d+)x(\d+)x(\d+)x\d+xf\d+>, tensor<(\d+)x(\d+)x"
    shapes = [tuple(map(int, match)) for match in re.findall(pattern, program)]
    assert len(shapes) == program.count("stablehlo.convolution(")
    return found + [str(s) for s in shapes if s[3] > s[1] or s[4] > s[2] or s[3] > 7]


def lowered_gradient(name: str, image_size: int | None = None) -> str:
    config = load(name)
    model, size = config.model, image_size or config.data.image_size
    network = adapt(resnet(model.name, 10, width=model.width, stem=model.stem))
    images = jax.ShapeDtypeStruct((8, size, size, 3), jnp.float32)
    params, state = jax.eval_shape(network.init, jax.random.key(0), images)

    def loss(params, state, images):
        return network.apply(params, state, images, train=True, key=None)[0].sum()

    return jax.jit(jax.grad(loss)).lower(params, state, images).as_text()


@pytest.mark.parametrize("name", config_names())
def test_no_network_of_configs_has_a_slow_operation(name):
    with jax.enable_x64(False):
        assert slow_operations(lowered_gradient(name)) == []


def test_nor_has_one_on_images_of_64_pixels():
    with jax.enable_x64(False):
        assert slow_operations(lowered_gradient("imagenet_resnet34", 64)) == []


def test_slow_operations_are_seen():
    def program(size: int) -> str:
        images, kernel = jnp.zeros((8, size, size, 4)), jnp.zeros((3, 3, 4, 4))
        return jax.jit(jax.grad(lambda k: by_xla(images, k, 1, 1).sum())).lower(kernel).as_text()

    assert slow_operations(program(2)) and slow_operations(program(8))
