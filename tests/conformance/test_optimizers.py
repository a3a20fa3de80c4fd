"""Every optimizer and every schedule: their numbers are those of the published formulas. For optimizers also: N devices
equal one, a resumed run equals the uninterrupted one, and groups of layers have the documented effect. Each optimizer
and schedule has a separate test file."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optax import contrib
from support.cases import essential_and_ci, essential_and_rare
from support.data import CLASSES, random_table
from support.networks import largest_difference
from support.optimizers import (
    assert_equal,
    by_hand,
    by_optax,
    config_of,
    optimizer_of,
    parameters,
    rate,
    rates,
    updated,
)
from support.runs import setup_of, train

from jaxddp.config.layers import Layers
from jaxddp.config.registry import OPTIMIZERS, SCHEDULES
from jaxddp.core.errors import Preempted
from jaxddp.engine.optimizer import only_trained, with_factors
from jaxddp.kernels import BY_NAME
from jaxddp.schedules import Steps, make_schedule
from jaxddp.training.checkpoints.manager import Checkpoints

pytestmark = pytest.mark.usefixtures("float64")


def momentum(nesterov: bool) -> Callable:
    """Sutskever's momentum, with the learning rate outside the buffer, as in Goyal et al. (arXiv:1706.02677, section 3)
    and PyTorch."""

    def update(p, g, memory, step, decays):
        g = g + 0.02 * p * decays
        memory[0] = 0.8 * memory[0] + g
        p -= rate(step) * (g + 0.8 * memory[0] if nesterov else memory[0])

    return functools.partial(by_hand, update)


def plain(p, g, memory, step, decays):
    p -= rate(step) * (g + 0.02 * p * decays)


def rmsprop(decay: float, epsilon: float, momentum: float) -> Callable:
    """Tieleman and Hinton's RMSProp, with PyTorch's epsilon outside the root and rate outside the buffer."""

    def update(p, g, memory, step, decays):
        g = g + 0.02 * p * decays
        memory[0] = decay * memory[0] + (1 - decay) * g**2
        memory[1] = momentum * memory[1] + g / (np.sqrt(memory[0]) + epsilon)
        p -= rate(step) * memory[1]

    return functools.partial(by_hand, update)


def adam_or_lamb(epsilon: float, adaptive: bool) -> Callable:
    """Loshchilov and Hutter's AdamW (arXiv:1711.05101, algorithm 2), with the schedule's rate on both terms, as in
    PyTorch and optax. `adaptive` is You et al.'s LAMB (arXiv:1904.00962, algorithm 2), where vectors keep Adam's
    update."""

    def update(p, g, memory, step, decays):
        memory[0] = 0.85 * memory[0] + 0.15 * g
        memory[1] = 0.98 * memory[1] + 0.02 * g**2
        mean, square = memory[0] / (1 - 0.85 ** (step + 1)), memory[1] / (1 - 0.98 ** (step + 1))
        u = mean / (np.sqrt(square) + epsilon) + 0.05 * p * decays
        p -= rate(step) * u * (np.linalg.norm(p) / np.linalg.norm(u) if decays and adaptive else 1)

    return functools.partial(by_hand, update)


def lars(p, g, memory, step, decays):
    """You et al.'s LARS (arXiv:1708.03888, algorithm 1), with the norm of the decayed gradient; vectors have SGD."""
    g = g + 0.02 * p * decays
    local = 0.01 * np.linalg.norm(p) / np.linalg.norm(g) if decays else 1
    memory[0] = 0.7 * memory[0] + rate(step) * local * g
    p -= memory[0]


def muon(steps: int) -> dict:
    """Optax's Muon, with convolutions as matrices."""
    matrix = contrib.MuonDimensionNumbers
    numbers = {
        "conv": {"kernel": matrix((0, 1, 2), 3)},
        "norm": {"scale": None, "bias": None},
        "head": {"kernel": matrix(0, 1), "bias": None},
    }
    settings = {"muon_weight_dimension_numbers": numbers, "consistent_rms": 0.2}
    return by_optax(contrib.muon(rate, weight_decay=0.05, adam_b2=0.98, **settings), steps)


def schedule_free(steps: int) -> dict:
    """Optax's schedule-free AdamW, with the rate of a step as its weight, and weight decay of kernels."""
    step = optax.adamw(rate, b1=0.0, b2=0.98, weight_decay=0.05, mask=BY_NAME.mask)
    return by_optax(contrib.schedule_free(step, lambda count: rate(count - 1), b1=0.85), steps)


ADAM_SETTINGS = {"momentum": 0.85, "beta2": 0.98, "weight_decay": 0.05}
RMSPROP_SETTINGS = {"momentum": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.02}
LARS_SETTINGS = {"momentum": 0.7, "nesterov": False, "weight_decay": 0.02, "trust_coefficient": 0.01}
STEPS_BY_HAND: dict[str, tuple[dict[str, Any], Callable[[int], dict]]] = {
    "momentum": ({"momentum": 0.8, "nesterov": False, "weight_decay": 0.02}, momentum(nesterov=False)),
    "momentum, nesterov": ({"momentum": 0.8, "nesterov": True, "weight_decay": 0.02}, momentum(nesterov=True)),
    "sgd": ({"weight_decay": 0.02}, functools.partial(by_hand, plain)),
    "sgd, momentum": ({"momentum": 0.8, "weight_decay": 0.02}, momentum(nesterov=False)),
    "rmsprop": ({"weight_decay": 0.02}, rmsprop(0.99, 1e-8, 0.0)),
    "rmsprop, momentum": (RMSPROP_SETTINGS, rmsprop(0.9, 1e-3, 0.8)),
    "adamw": (ADAM_SETTINGS, adam_or_lamb(1e-8, adaptive=False)),
    "lars": (LARS_SETTINGS, functools.partial(by_hand, lars)),
    "lamb": (ADAM_SETTINGS, adam_or_lamb(1e-6, adaptive=True)),
    "muon": ({"momentum": 0.95, "beta2": 0.98, "weight_decay": 0.05}, muon),
    "schedule_free": (ADAM_SETTINGS | {"schedule": "constant"}, schedule_free),
}
"""For each optimizer and variant, its config and the parameters after some steps by its formula."""


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS_BY_HAND)
def test_steps_of_every_optimizer_equal_those_by_hand(case):
    words, expected = STEPS_BY_HAND[case]
    assert_equal(updated(config_of(name=case.partition(",")[0], **words), 5), expected(5))


def test_every_optimizer_and_every_schedule_has_its_formula():
    assert {case.partition(",")[0] for case in STEPS_BY_HAND} == set(OPTIMIZERS.names())
    assert sorted(RATES_BY_HAND) == SCHEDULES.names()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_weight_decay_of_a_group_replaces_the_configs(name):
    """A decay of all kernels by groups equals the config's decay; another decay changes its own group alone."""
    schedule = {"schedule": "constant"}
    usual = updated(config_of(name=name, weight_decay=0.03, **schedule), 3)
    grouped = ["head:decay=0.03", "conv:decay=0.03"]
    assert_equal(updated(config_of(name=name, weight_decay=0.5, groups=grouped, **schedule), 3), usual)
    actual = updated(config_of(name=name, weight_decay=0.03, groups=["head:decay=0"], **schedule), 3)
    none = updated(config_of(name=name, weight_decay=0.0, **schedule), 3)
    assert_equal(actual, {**usual, "head": none["head"]})
    assert largest_difference(usual["head"], none["head"]) > 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_supports_frozen_layers_and_rates_of_layers(name):
    """Frozen parameters have no update and the others are unchanged. A rate of 0 keeps every bit."""
    config = config_of(name=name, schedule="constant", weight_decay=0.02)
    optimizer, params = OPTIMIZERS.get(name)(config, rate), jax.tree.map(jnp.asarray, parameters())
    alone = by_optax(optimizer, 3, {layer: params[layer] for layer in ("conv", "norm")})
    frozen = by_optax(only_trained(optimizer, Layers(("head",))), 3, params, Layers(("head",)))
    assert_equal({layer: frozen[layer] for layer in alone}, alone)
    stopped = by_optax(with_factors(optimizer, {"head/kernel": 0.0}), 3, params)
    np.testing.assert_array_equal(stopped["head"]["kernel"], params["head"]["kernel"])
    assert_equal({layer: stopped[layer] for layer in alone}, alone)


STEPS = 8
TABLE = random_table(50)
CHANGES = {"train": {"duration": f"{STEPS} steps"}, "log": {"every": "4 steps"}, "eval": {"every": "0 steps"}}
"""The learning rates of optimizers for which 0.02 is too high or too low."""


class TwoLayers(nn.Module):
    """Kernels and vectors, whose norms must be those of the whole arrays on every device."""

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(4, param_dtype=jnp.float64)(images.reshape(len(images), -1))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(nn.tanh(x))


def make_setup(name: str, devices: int) -> Any:
    return setup_of(TwoLayers(), optimizer_of(name, STEPS), TABLE, devices=devices, seed=5)


@functools.cache
def uninterrupted(name: str, devices: int) -> tuple[Any, Any]:
    """Return the parameters before a run, and the state after it."""
    setup = make_setup(name, devices)
    before = jax.device_get(setup.state.params)
    return before, jax.device_get(train(setup, CHANGES))


OF_WHOLE_ARRAYS = ("lamb", "lars", "muon")
"""Optimizers that use norms and products of arrays. The others treat each number separately."""
OTHERS = [name for name in OPTIMIZERS.names() if name not in OF_WHOLE_ARRAYS]
DIFFERENT_STATES = ("momentum", "adamw", "muon", "schedule_free")
"""Optimizers whose states have different forms; LARS has that of momentum, and LAMB that of AdamW."""


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((1,), 2, 8))
@pytest.mark.parametrize("name", essential_and_rare(OF_WHOLE_ARRAYS, *OTHERS))
def test_any_number_of_devices_equals_one(name, devices):
    assert largest_difference(uninterrupted(name, devices)[1], uninterrupted(name, 4)[1]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", essential_and_ci(DIFFERENT_STATES, OPTIMIZERS.names()))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, name):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(Preempted):
            train(make_setup(name, 4), CHANGES, checkpoints=checkpoints, should_stop=lambda step: step == 3)
        resumed = train(make_setup(name, 4), CHANGES, checkpoints=checkpoints, resume_step=3)
    before, state = uninterrupted(name, 4)
    assert largest_difference(jax.device_get(resumed), state) == 0
    moved = jax.tree.map(lambda one, other: np.abs(one - other).max(), before, state.params)
    assert min(jax.tree.leaves(moved)) > 1e-4 and max(jax.tree.leaves(moved)) < 10


PEAK = 0.8


@dataclasses.dataclass(frozen=True)
class Run:
    """The length of a run, and its settings for schedules."""

    total: int
    warmup: int
    end: float
    power: float
    share: float
    step_at: tuple[float, ...]

    @property
    def falling(self) -> int:
        return max(self.total - self.warmup, 1)

    @property
    def passed(self) -> np.ndarray:
        """Return the share of the steps after the warm-up that is over at each step."""
        return np.arange(self.total - self.warmup) / self.falling

    def rates(self, schedule: str) -> np.ndarray:
        words = {"end_factor": self.end, "power": self.power, "decay_share": self.share}
        words |= {"step_at": self.step_at, "step_factor": 0.5}
        return rates(self.total, self.warmup, PEAK, schedule=schedule, **words)


def stepwise(run: Run) -> np.ndarray:
    """The rate falls once for each share, however short the run."""
    steps = range(run.warmup, run.total)
    return 0.5 ** np.array([sum(step >= round(at * run.total) for at in run.step_at) for step in steps], float)


def wsd(run: Run) -> np.ndarray:
    """The rate is constant, and falls over the last share of the run."""
    falling = min(round(run.share * run.total), run.falling)
    passed = np.clip(np.arange(run.warmup, run.total) - (run.falling + run.warmup - falling), 0, None)
    return 1 + (run.end - 1) * passed / max(falling, 1)


def one_cycle(run: Run) -> np.ndarray:
    """The rate falls to 1/25 over 55 of the 70 percent of the run that follow the rise, and then to 1/250,000."""
    first, steps = max(int(0.55 / 0.7 * run.falling), 1), np.arange(run.total - run.warmup)
    rest = np.clip((steps - first) / max(run.falling - first, 1), 0, 1)
    return np.where(steps < first, 1 - (1 - 1 / 25) * steps / first, 1 / 25 - (1 / 25 - 1 / 250_000) * rest)


RATES_BY_HAND: dict[str, Callable[[Run], np.ndarray]] = {
    "constant": lambda run: np.ones(run.total - run.warmup),
    "cosine": lambda run: run.end + (1 - run.end) * (1 + np.cos(np.pi * run.passed)) / 2,
    "linear": lambda run: 1 + (run.end - 1) * run.passed,
    "one_cycle": one_cycle,
    # A part of the step follows validations.
    "plateau": lambda run: np.ones(run.total - run.warmup),
    "polynomial": lambda run: run.end + (1 - run.end) * (1 - run.passed) ** run.power,
    "step": stepwise,
    "wsd": wsd,
}
"""For each schedule, the learning rate relative to the peak, after the warm-up."""
SHARES = st.floats(0, 1)
RUNS = st.builds(
    lambda lengths, **words: Run(max(lengths), min(lengths), **words),
    lengths=st.tuples(st.integers(1, 300), st.integers(0, 300)),
    end=SHARES,
    power=st.floats(0.1, 5),
    share=SHARES,
    step_at=st.lists(st.floats(0.05, 1), max_size=4).map(tuple),
)


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(run=RUNS)
def test_rates_of_every_schedule_equal_those_by_hand_after_the_warm_up(name, run):
    """For all lengths, also a run of one step, every rate is a finite number and none exceeds the peak."""
    actual = run.rates(name)
    rise = np.arange(1, run.warmup + 1) / max(run.warmup, 1)
    np.testing.assert_allclose(actual[: run.warmup], PEAK * rise, rtol=1e-6)
    np.testing.assert_allclose(actual[run.warmup :], PEAK * RATES_BY_HAND[name](run), rtol=1e-5, atol=1e-7)
    assert np.isfinite(actual).all() and (actual >= 0).all() and (actual <= PEAK * (1 + 1e-6)).all()
    # If nothing comes before its first fall, "step" has no peak.
    falls_at_once = name == "step" and run.warmup == 0 and any(round(at * run.total) == 0 for at in run.step_at)
    assert actual.max() == pytest.approx(PEAK, rel=1e-6) or falls_at_once


ENDS = {"constant": 1, "plateau": 1, "one_cycle": 1 / 250_000}
"""The last rate relative to the peak, of schedules that do not end at `end_factor`."""


@pytest.mark.parametrize("name", [name for name in SCHEDULES.names() if name != "step"])
@pytest.mark.parametrize(("total", "warmup", "end"), [(300, 20, 0.3), (7, 0, 0.0), (9, 7, 0.3)])
def test_the_rate_ends_at_the_documented_factor(name, total, warmup, end):
    config = config_of(learning_rate=PEAK, schedule=name, end_factor=end, decay_share=0.5)
    schedule = make_schedule(config, Steps(total, warmup))
    for step in (total, 10 * total):
        assert float(schedule(step)) == pytest.approx(PEAK * ENDS.get(name, end), rel=1e-5, abs=1e-9)
