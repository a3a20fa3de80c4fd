"""Apply an optimizer to a few parameters, from its config and in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.config import Config
from jaxddp.config.layers import NO_LAYERS
from jaxddp.config.registry import OPTIMIZERS
from jaxddp.models.interface import with_frozen, without_frozen
from jaxddp.schedules import Steps, make_schedule

LONGEST = 300
"""The number of steps of a run whose learning rates are tested."""


def config_of(**optimizer) -> Config:
    return Config().replace(optimizer=optimizer)


def make_optimizer(config: Config, learning_rate) -> optax.GradientTransformation:
    return OPTIMIZERS.get(config.optimizer.name)(config, learning_rate)


@functools.cache
def optimizer_of(name: str, steps: int) -> optax.GradientTransformation:
    """Return an optimizer with a constant rate, after a warmup of 3 steps, at which a small network learns."""
    rate = {"sgd": 0.3, "rmsprop": 0.01, "momentum": 0.05, "lars": 1.0}.get(name, 0.02)
    config = config_of(name=name, learning_rate=rate, schedule="constant", weight_decay=0.01)
    return make_optimizer(config, make_schedule(config, Steps(steps, 3)))


def parameters() -> dict:
    """Return a convolution, a norm and a dense layer."""
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
    return 0.3 / (1 + abs(step - 1))


def updated(config: Config, steps: int) -> dict:
    """Return the parameters after some steps of the config's optimizer."""
    optimizer, params = make_optimizer(config, rate), jax.tree.map(jnp.asarray, parameters())
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


def by_optax(optimizer, steps: int, params=None, frozen=NO_LAYERS) -> dict:
    """Return the parameters after some steps of an optimizer that keeps no state for frozen parameters."""
    params = jax.tree.map(jnp.asarray, params or parameters())
    state = optimizer.init(params)
    for step in range(steps):
        grads = gradients(step)
        updates, state = optimizer.update({layer: grads[layer] for layer in params}, state, params)
        params = with_frozen(optax.apply_updates(without_frozen(params, frozen), updates), params)
    return jax.device_get(params)


def by_hand(update, steps: int) -> dict:
    """Return the parameters after `update(p, g, memory, step, decays)`, which changes p and memory in place."""
    params = parameters()
    memories = jax.tree.map(lambda p: np.zeros((2, *p.shape)), params)
    for step in range(steps):
        jax.tree.map(lambda p, g, m, s=step: update(p, g, m, s, p.ndim > 1), params, gradients(step), memories)
    return params


def assert_equal(actual: dict, expected: dict) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), actual, expected)


def rates(total: int, warmup: int, peak: float, **words) -> np.ndarray:
    """Return the learning rate of every step of a run."""
    schedule = make_schedule(config_of(learning_rate=peak, **words), Steps(total, warmup))
    # Use one shape for every run, so that JAX compiles its operations once.
    return np.asarray(jax.vmap(schedule)(jnp.arange(LONGEST)))[:total]
