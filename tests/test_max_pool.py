"""Max pooling equals Flax's, also for equal pixels and NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.cases import costly

from jaxddp.models.ops.layers import flax_max_pool, max_pool


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
    shape = jax.eval_shape(lambda x: flax_max_pool(x, *settings), images).shape
    weights = jnp.asarray(rng.integers(-4, 5, shape), dtype)
    actual = value_and_gradient(max_pool, settings, images, weights)
    expected = value_and_gradient(flax_max_pool, settings, images, weights)
    for result, flax_result in zip(actual, expected, strict=True):
        assert result.dtype == flax_result.dtype
        np.testing.assert_array_equal(result, flax_result)


@pytest.mark.parametrize("position", [(0, 0), (1, 2), (3, 3)])
def test_max_pooling_propagates_nan(position):
    images = jnp.ones((1, 4, 4, 1)).at[0, *position, 0].set(jnp.nan)
    np.testing.assert_array_equal(max_pool(images), flax_max_pool(images, 3, 2, 1))
    assert np.isnan(max_pool(images)).any()
