"""Schedules and optimizers against the formulas they are named for, written in NumPy."""

import math
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.optimizers.decay import decayed
from jaxddp.registry import MODELS, OPTIMIZERS
from jaxddp.schedules.peak import at_batch_size, batch_factor, derivation
from jaxddp.schedules.warmup import Steps, make_schedule
from jaxddp.training.plan import Plan

PEAK = 0.8
LONGEST = 300
runs = st.integers(1, LONGEST).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def config_of(**optimizer) -> Config:
    return Config().replace(optimizer=optimizer)


def make_optimizer(config: Config, learning_rate) -> optax.GradientTransformation:
    return OPTIMIZERS.get(config.optimizer.name)(config, learning_rate)


def rates(total: int, warmup: int, **changes) -> np.ndarray:
    """The learning rate of every step of a run."""
    schedule = make_schedule(config_of(learning_rate=PEAK, **changes), Steps(total, warmup))
    # Of one shape for every run, so that JAX compiles its operations once.
    return np.asarray(jax.vmap(schedule)(jnp.arange(LONGEST)))[:total]


# --- Schedules ---


SCHEDULES_NAMED = ["cosine", "linear", "step", "constant", "polynomial", "one_cycle", "wsd"]


@given(runs, st.sampled_from(SCHEDULES_NAMED))
@settings(max_examples=60)
def test_warm_up_rises_by_equal_steps_from_the_first_to_the_peak(run, schedule):
    total, warmup = run
    rise = PEAK * np.arange(1, warmup + 1) / np.maximum(warmup, 1)
    np.testing.assert_allclose(rates(total, warmup, schedule=schedule)[:warmup], rise, rtol=1e-6)


@given(runs)
@settings(max_examples=60)
def test_cosine_falls_from_the_peak_towards_zero(run):
    total, warmup = run
    passed = np.arange(total - warmup) / max(total - warmup, 1)
    half_wave = PEAK * (1 + np.cos(np.pi * passed)) / 2
    np.testing.assert_allclose(rates(total, warmup, schedule="cosine")[warmup:], half_wave, rtol=1e-5, atol=1e-7)


def test_cosine_ends_at_zero():
    schedule = make_schedule(config_of(learning_rate=PEAK), Steps(100, 5))
    assert float(schedule(5)) == pytest.approx(PEAK)
    assert 0 < float(schedule(99)) < 1e-3 * PEAK
    assert float(schedule(100)) == float(schedule(10**6)) == 0


@given(runs, st.floats(0, 1))
@settings(max_examples=60)
def test_linear_falls_from_the_peak_towards_its_end(run, end):
    total, warmup = run
    passed = np.arange(total - warmup) / max(total - warmup, 1)
    found = rates(total, warmup, schedule="linear", end_factor=end)[warmup:]
    np.testing.assert_allclose(found, PEAK * (1 + (end - 1) * passed), rtol=1e-5, atol=1e-7)


@given(runs)
@settings(max_examples=20)
def test_constant_stays_at_the_peak(run):
    total, warmup = run
    np.testing.assert_allclose(rates(total, warmup, schedule="constant")[warmup:], PEAK)


@given(runs, st.floats(0, 1), st.floats(0.1, 5))
@settings(max_examples=60)
def test_polynomial_falls_by_a_power_of_what_is_left(run, end, power):
    total, warmup = run
    left = 1 - np.arange(total - warmup) / max(total - warmup, 1)
    found = rates(total, warmup, schedule="polynomial", end_factor=end, power=power)[warmup:]
    np.testing.assert_allclose(found, PEAK * (end + (1 - end) * left**power), rtol=1e-5, atol=1e-7)


@given(runs, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60)
def test_wsd_stays_and_falls_over_the_last_share_of_the_run(run, end, share):
    total, warmup = run
    falling = min(round(share * total), max(total - warmup, 1))
    passed = np.clip(np.arange(warmup, total) - (max(total - warmup, 1) + warmup - falling), 0, None)
    found = rates(total, warmup, schedule="wsd", end_factor=end, decay_share=share)[warmup:]
    np.testing.assert_allclose(found, PEAK * (1 + (end - 1) * passed / max(falling, 1)), rtol=1e-5, atol=1e-7)


def test_one_cycle_is_that_of_optax_behind_its_rise():
    """With the warm-up that makes it the policy of the paper."""
    found = rates(200, 60, schedule="one_cycle")
    whole = optax.linear_onecycle_schedule(200, PEAK)
    np.testing.assert_allclose(found[60:], [whole(step) for step in range(60, 200)], rtol=1e-5)


@given(runs, st.sampled_from(SCHEDULES_NAMED), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=100)
def test_the_peak_is_reached_and_never_exceeded(run, schedule, end, share):
    """Whatever the lengths, and a run of one step, too; every rate is a number."""
    found = rates(*run, schedule=schedule, end_factor=end, decay_share=share)
    assert np.isfinite(found).all() and (found >= 0).all() and (found <= PEAK * (1 + 1e-6)).all()
    # Where nothing comes before its first fall, "step" has no peak.
    assert found.max() == pytest.approx(PEAK, rel=1e-6) or (schedule == "step" and round(run[0] / 3) <= run[1] == 0)


@given(runs.filter(lambda run: run[0] - run[1] > 1), st.floats(0, 1))
@settings(max_examples=60)
def test_a_schedule_ends_where_it_says(run, end):
    total, warmup = run
    ends = {"cosine": 0, "linear": end, "polynomial": end, "wsd": end, "one_cycle": 1 / 250_000, "constant": 1}
    for name, factor in ends.items():
        config = config_of(learning_rate=PEAK, schedule=name, end_factor=end, decay_share=0.5)
        last = float(make_schedule(config, Steps(total, warmup))(total))
        assert last == pytest.approx(PEAK * factor, rel=1e-5, abs=1e-9), name


# --- The peak for another batch size ---


@pytest.mark.parametrize(
    ("scaling", "peak", "line"),
    [
        ("linear", 0.4, "learning rate 0.4 = 0.1 x 1024 / 256 (linear, for optimizer.reference_batch=256)"),
        ("sqrt", 0.2, "learning rate 0.2 = 0.1 x sqrt(1024 / 256) (sqrt, for optimizer.reference_batch=256)"),
        ("none", 0.1, None),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES_NAMED)
def test_the_peak_follows_the_batch_size(scaling, peak, line, schedule):
    config = config_of(reference_batch=256, scaling=scaling, schedule=schedule).replace(train={"batch_size": 1024})
    assert float(make_schedule(config, Steps(30, 3))(2)) == pytest.approx(peak)
    assert at_batch_size(config).optimizer.learning_rate == pytest.approx(peak)
    assert at_batch_size(at_batch_size(config)) == at_batch_size(config)
    assert derivation(config) == line


def test_a_config_without_a_reference_is_for_its_own_batch():
    config = Config()
    assert at_batch_size(config) is config and batch_factor(config) == 1 and derivation(config) is None


def test_a_peak_out_of_range_is_one_line():
    config = config_of(learning_rate=1e6, reference_batch=1)
    with pytest.raises(InputError, match="optimizer.learning_rate=256000000.0: expected 0 to 1,000,000"):
        make_schedule(config, Steps(10, 1))


@pytest.mark.parametrize("warmup", [0, 5])
def test_step_falls_at_its_shares_of_the_run(warmup):
    found = rates(90, warmup, schedule="step", step_at=(1 / 3, 2 / 3, 8 / 9), step_factor=0.1)
    expected = PEAK * np.repeat([1, 0.1, 0.01, 0.001], [30, 30, 20, 10])
    np.testing.assert_allclose(found[warmup:], expected[warmup:], rtol=1e-6)


@given(runs, st.lists(st.floats(0.05, 1), max_size=4))
@settings(max_examples=60)
def test_step_falls_once_for_each_share_however_short_the_run(run, shares):
    total, warmup = run
    falls = [sum(step >= round(share * total) for share in shares) for step in range(warmup, total)]
    found = rates(total, warmup, schedule="step", step_at=shares, step_factor=0.5)[warmup:]
    np.testing.assert_allclose(found, PEAK * 0.5 ** np.array(falls, float), rtol=1e-6)


def test_a_warm_up_as_long_as_the_run_is_allowed_and_a_longer_one_is_not():
    assert rates(10, 10)[-1] == pytest.approx(PEAK)
    config = config_of(warmup="11 steps")
    with pytest.raises(
        InputError, match='optimizer.warmup="11 steps" is 11 steps, longer than the run of 10; shorten it'
    ):
        make_schedule(config, Steps(10, 11))


def test_a_percentage_warm_up_keeps_its_shape_in_a_short_run():
    warmup = Config().optimizer.warmup
    for total, steps in ((1000, 50), (10, 1), (1, 1)):
        assert warmup.steps(num_examples=100, batch_size=10, total_steps=total) == steps


@pytest.mark.parametrize(("name", "nearest"), [("cosin", "cosine"), ("steps", "step"), ("const", "constant")])
def test_an_unknown_schedule_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(InputError, match=f"optimizer.schedule='{name}' is unknown; did you mean '{nearest}'"):
        make_schedule(config_of(schedule=name), Steps(10, 1))


@pytest.mark.parametrize(("name", "nearest"), [("adam", "adamw"), ("momentun", "momentum")])
def test_an_unknown_optimizer_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(InputError, match=f"optimizer.name='{name}' is unknown; did you mean '{nearest}'"):
        make_optimizer(config_of(name=name), optax.constant_schedule(0.1))


def test_a_run_of_no_steps_is_refused():
    with pytest.raises(InputError, match='train.duration="0 epochs" is less than one step; give at least "1 step"'):
        Plan.of(Config().replace(train={"duration": "0 epochs"}), 100)


# --- Optimizers ---


def parameters() -> dict:
    """A convolution, a normalization and a dense layer."""
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


def run(config: Config, steps: int) -> dict:
    """The parameters after some steps, by the code."""
    optimizer, params = make_optimizer(config, rate), jax.tree.map(jnp.asarray, parameters())
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


def by_hand(update, steps: int) -> dict:
    """The parameters after some steps, by `update(p, g, memory, step, decays)`, which changes p and memory in place."""
    params = parameters()
    memories = jax.tree.map(lambda p: np.zeros((2, *p.shape)), params)
    for step in range(steps):
        jax.tree.map(lambda p, g, m, s=step: update(p, g, m, s, p.ndim > 1), params, gradients(step), memories)
    return params


def assert_equal(found: dict, expected: dict) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, expected)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_weight_decay_touches_kernels_only(name):
    """With no gradient a kernel shrinks by decay times rate (and once more times mu, with Nesterov's look ahead)."""
    config = config_of(name=name, weight_decay=0.01)
    params = parameters()
    optimizer = make_optimizer(config, rate)
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    found = optax.apply_updates(params, updates)
    shrunk = 1 - rate(0) * 0.01 * (1 + config.optimizer.momentum if name == "momentum" else 1)
    for layer, leaves in params.items():
        for leaf, before in leaves.items():
            factor = shrunk if leaf == "kernel" else 1
            np.testing.assert_allclose(found[layer][leaf], factor * before, rtol=1e-12, err_msg=f"{layer}/{leaf}")


def test_decayed_are_the_kernels():
    assert decayed(parameters()) == {
        "conv": {"kernel": True},
        "norm": {"scale": False, "bias": False},
        "head": {"kernel": True, "bias": False},
    }


def test_the_training_script_decays_kernels_alone():
    script = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "main.py"))
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2), "bias": jnp.ones(2)}
    optimizer = script["make_optimizer"](1.0)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert {name for name, update in updates.items() if update.any()} == {"kernel"}


def test_the_tables_of_a_vit_are_not_decayed():
    model = MODELS.get("vit_ti16")(Config(), 10)
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    left = [path for path, is_decayed in traverse_util.flatten_dict(decayed(params), sep="/").items() if is_decayed]
    assert len(left) == 12 * 4 + 2 and all(path.endswith("/kernel") for path in left)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_sutskevers(nesterov):
    """With the rate outside of the buffer, as in Goyal et al. (arXiv:1706.02677, section 3) and PyTorch."""
    config = config_of(name="momentum", momentum=0.8, nesterov=nesterov, weight_decay=0.02)

    def update(p, g, memory, step, decays):
        g = g + 0.02 * p * decays
        memory[0] = 0.8 * memory[0] + g
        p -= rate(step) * (g + 0.8 * memory[0] if nesterov else memory[0])

    assert_equal(run(config, 6), by_hand(update, 6))


def test_adamw_is_loshchilov_and_hutters():
    """arXiv:1711.05101, algorithm 2, with the schedule's rate on both terms, as PyTorch and optax have it."""
    config = config_of(name="adamw", momentum=0.85, beta2=0.98, weight_decay=0.05)

    def update(p, g, memory, step, decays):
        memory[0] = 0.85 * memory[0] + 0.15 * g
        memory[1] = 0.98 * memory[1] + 0.02 * g**2
        mean, square = memory[0] / (1 - 0.85 ** (step + 1)), memory[1] / (1 - 0.98 ** (step + 1))
        p -= rate(step) * (mean / (np.sqrt(square) + 1e-8) + 0.05 * p * decays)

    assert_equal(run(config, 6), by_hand(update, 6))


def test_the_schedule_of_a_config_drives_its_optimizer():
    """Plain SGD with a gradient of one moves by the sum of the rates."""
    config = config_of(momentum=0.0, nesterov=False, weight_decay=0.0)
    schedule = make_schedule(config, Steps(20, 4))
    optimizer, weight = make_optimizer(config, schedule), jnp.zeros((1, 1))
    state = optimizer.init(weight)
    for _ in range(20):
        updates, state = optimizer.update(jnp.ones((1, 1)), state, weight)
        weight = optax.apply_updates(weight, updates)
    rise = sum((i + 1) / 4 for i in range(4))
    fall = sum((1 + math.cos(math.pi * i / 16)) / 2 for i in range(16))
    assert float(weight[0, 0]) == pytest.approx(-0.1 * (rise + fall), rel=1e-6)
