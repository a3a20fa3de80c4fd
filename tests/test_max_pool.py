"""Max pooling equals Flax's, also for equal pixels and NaN."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.cases import costly

from jaxddp.models.ops.layers import max_pool


def flax_pool(images, window, stride, padding):
    return nn.max_pool(images, (window,) * 2, (stride,) * 2, ((padding,) * 2,) * 2)


@functools.partial(jax.jit, static_argnames=("pool", "settings"))
def value_and_gradient(pool, settings, images, weights):
    value, vjp = jax.vjp(lambda x: pool(x, *settings), images)
    return value, *vjp(weights)


@pytest.mark.slow
@costly
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(3, 2, 1), (2, 2, 0), (3, 1, 1), (3, 3, 0), (1, 1, 0), (2, 3, 0), (5, 2, 2), (4, 3, 1)]),
    st.integers(0, 1000),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_values_and_gradients_of_max_pooling_equal_flaxs_also_for_equal_pixels(sides, settings, seed, dtype):
    window, _, padding = settings
    assume(min(sides) + 2 * padding >= window)
    rng = np.random.default_rng(seed)
    images = jnp.asarray(rng.integers(-2, 3, (2, *sides, 3)), dtype)
    weights = jnp.asarray(rng.integers(-4, 5, jax.eval_shape(lambda x: flax_pool(x, *settings), images).shape), dtype)
    actual = value_and_gradient(max_pool, settings, images, weights)
    expected = value_and_gradient(flax_pool, settings, images, weights)
    for result, flax_result in zip(actual, expected, strict=True):
        assert result.dtype == flax_result.dtype
        np.testing.assert_array_equal(result, flax_result)


@pytest.mark.slow
def test_the_first_of_equal_pixels_gets_the_gradient():
    images = jnp.zeros((1, 4, 4, 1)).at[0, 0, :2, 0].set(1.0)
    gradient = jax.grad(lambda x: max_pool(x)[0, 0, 0, 0])(images)[0, :, :, 0]
    np.testing.assert_array_equal(gradient, jnp.zeros((4, 4)).at[0, 0].set(1.0))


@pytest.mark.parametrize("position", [(0, 0), (1, 2), (3, 3)])
def test_max_pooling_propagates_nan(position):
    images = jnp.ones((1, 4, 4, 1)).at[0, *position, 0].set(jnp.nan)
    np.testing.assert_array_equal(max_pool(images), flax_pool(images, 3, 2, 1))
    assert np.isnan(max_pool(images)).any()
