"""Dropout before the head, squeeze and excitation, and the shortcuts of ResNet-D: their equations."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.networks import with_two_blocks

from jaxddp.core.errors import InputError
from jaxddp.models.inverted_residual import ARCHITECTURES, InvertedResidualNetwork
from jaxddp.models.ops.layers import SqueezeExcitation, branch_factors, dropout, nearest_multiple
from jaxddp.models.resnet import halve

KEYS = functools.partial(jax.random.split, jax.random.key(5))


def test_features_are_dropped_at_the_rate_and_the_others_are_scaled_up():
    rate, features = 0.3, jnp.full((200, 50), 2.0)
    dropped = np.asarray(dropout(features, rate, KEYS(200)))
    share = (dropped == 0).mean()
    # Five standard deviations of a binomial distribution.
    assert abs(share - rate) <= 5 * (rate * (1 - rate) / dropped.size) ** 0.5
    np.testing.assert_allclose(dropped[dropped > 0], 2 / (1 - rate), rtol=1e-6)


def test_the_features_that_an_example_drops_depend_on_its_key_alone():
    features, keys = jnp.ones((6, 40)), KEYS(6)
    whole = dropout(features, 0.5, keys)
    assert len({row.tobytes() for row in np.asarray(whole)}) == 6
    np.testing.assert_array_equal(dropout(features[2:4], 0.5, keys[2:4]), whole[2:4])


def test_dropout_and_stochastic_depth_draw_different_numbers():
    keys = KEYS(300)
    dropped = np.asarray(dropout(jnp.ones((300, 1)), 0.5, keys))[:, 0] == 0
    skipped = np.asarray(branch_factors(0.5, 2, 1, keys)[1])[:, 0] == 0
    first = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (1,)))(keys))[:, 0] < 0.5
    for others in (skipped, first):
        # Five standard deviations of the number of equal draws.
        assert abs((dropped == others).sum() - 150) <= 5 * 75**0.5


def test_dropout_without_keys_raises_a_one_line_error():
    with pytest.raises(InputError, match="^dropout: in training every image needs its own random key; pass example"):
        dropout(jnp.ones((2, 3)), 0.5, None)


@pytest.mark.slow
def test_a_mobilenet_drops_in_training_only_and_keeps_99_percent_of_its_statistics():
    sizes = with_two_blocks(ARCHITECTURES["mobilenet_v3_large"])
    images = np.random.default_rng(0).standard_normal((8, 16, 16, 3), np.float32)
    network = InvertedResidualNetwork(sizes, 3, dropout=0.5)
    variables = jax.jit(network.init)(jax.random.key(0), images)

    @functools.partial(jax.jit, static_argnums=0)
    def train(dropout, keys):
        module = network.clone(dropout=dropout)
        return module.apply(variables, images, train=True, example_keys=keys, mutable=["batch_stats"])

    (plain, updated), (dropped, _), (others, _) = train(0.0, None), train(0.5, KEYS(8)), train(0.5, KEYS(9)[1:])
    assert np.abs(plain - dropped).max() > 1e-4 < np.abs(others - dropped).max()
    evaluate = jax.jit(lambda rate: network.clone(dropout=rate).apply(variables, images), static_argnums=0)
    np.testing.assert_array_equal(evaluate(0.5), evaluate(0.0))
    convolved = nn.Conv(8, (3, 3), 2, 1, use_bias=False).apply({"params": variables["params"]["stem"]["conv"]}, images)
    running = updated["batch_stats"]["stem"]["norm"]
    np.testing.assert_allclose(running["mean"], 0.01 * convolved.mean((0, 1, 2)), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(running["var"], 0.99 + 0.01 * convolved.var((0, 1, 2)), rtol=1e-5)


def test_squeeze_and_excitation_equals_its_equation():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w1, w2 = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(5, 2)), rng.normal(size=(2, 5))
        b1, b2 = rng.normal(size=2), rng.normal(size=5)
        layers = {"fc1": {"kernel": w1[None, None], "bias": b1}, "fc2": {"kernel": w2[None, None], "bias": b2}}
        module = SqueezeExcitation(2, nn.relu, nn.hard_sigmoid, dtype=jnp.float64, param_dtype=jnp.float64)
        squeezed = np.maximum(x.mean((1, 2)) @ w1 + b1, 0)
        factors = np.clip((squeezed @ w2 + b2) / 6 + 0.5, 0, 1)
        np.testing.assert_allclose(module.apply({"params": layers}, x), x * factors[:, None, None], rtol=1e-12)


def test_halved_images_are_the_means_of_the_pixels_that_exist():
    images = np.arange(15.0).reshape(1, 3, 5, 1)
    np.testing.assert_allclose(halve(jnp.asarray(images))[0, ..., 0], [[3.0, 5.0, 6.5], [10.5, 12.5, 14.0]])


@pytest.mark.parametrize(("features", "least", "expected"), [(18, 0.9, 24), (18, 0, 16), (3, 0.9, 8), (44, 0.9, 48)])
def test_the_nearest_multiple_is_not_much_smaller_than_the_number(features, least, expected):
    assert nearest_multiple(features, 8, least) == expected
