"""Applies optimizers to a few parameters, by config and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.config import Config
from jaxddp.layers import NO_LAYERS
from jaxddp.models.frozen import trained, whole
from jaxddp.registry import OPTIMIZERS
from jaxddp.schedules.warmup import Steps, make_schedule

LONGEST = 300
"""Maximum number of steps of a run for `rates`."""


def config_of(**optimizer) -> Config:
    return Config().replace(optimizer=optimizer)


def make_optimizer(config: Config, learning_rate) -> optax.GradientTransformation:
    return OPTIMIZERS.get(config.optimizer.name)(config, learning_rate)


def parameters() -> dict:
    """Returns parameters of a convolution, a normalization and a dense layer."""
    rng = np.random.default_rng(0)
    shapes = {
        "conv": {"kernel": (3, 3, 2, 4)},
        "norm": {"scale": (4,), "bias": (4,)},
        "head": {"kernel": (4, 3), "bias": (3,)},
    }
    return jax.tree.map(lambda shape: rng.normal(size=shape), shapes, is_leaf=lambda x: isinstance(x, tuple))


def gradients(step: int) -> dict:
    rng = np.random.default_rng(100 + step)
    return jax.tree.map(lambda p: rng.normal(size=p.shape), parameters())


def rate(step):
    return 0.3 / (1 + step)


def updated(config: Config, steps: int) -> dict:
    """Returns the parameters after some steps of the config's optimizer."""
    optimizer, params = make_optimizer(config, rate), jax.tree.map(jnp.asarray, parameters())
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


def by_optax(optimizer, steps: int, params=None, frozen=NO_LAYERS) -> dict:
    """Returns the parameters after some steps of an optimizer without state for frozen parameters."""
    params = jax.tree.map(jnp.asarray, params or parameters())
    state = optimizer.init(params)
    for step in range(steps):
        grads = gradients(step)
        updates, state = optimizer.update({layer: grads[layer] for layer in params}, state, params)
        params = whole(optax.apply_updates(trained(params, frozen), updates), params)
    return jax.device_get(params)


def by_hand(update, steps: int) -> dict:
    """Returns the parameters after some steps of `update(p, g, memory, step, decays)`, which works in place."""
    params = parameters()
    memories = jax.tree.map(lambda p: np.zeros((2, *p.shape)), params)
    for step in range(steps):
        jax.tree.map(lambda p, g, m, s=step: update(p, g, m, s, p.ndim > 1), params, gradients(step), memories)
    return params


def assert_equal(found: dict, expected: dict) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, expected)


def rates(total: int, warmup: int, peak: float, **words) -> np.ndarray:
    """Returns the learning rate of every step of a run."""
    schedule = make_schedule(config_of(learning_rate=peak, **words), Steps(total, warmup))
    # All runs have one shape, so that JAX compiles the operations once.
    return np.asarray(jax.vmap(schedule)(jnp.arange(LONGEST)))[:total]
