"""Single schedules and optimizers, besides `conformance/test_optimizers.py`, and the peak learning rate for another
batch size."""

import math
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from support.optimizers import config_of, make_optimizer, parameters, rates

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.optimizers.decay import decay_mask
from jaxddp.optimizers.sgd import SgdSettings
from jaxddp.registry import MODELS
from jaxddp.schedules.peak import at_batch_size, batch_factor, derivation
from jaxddp.schedules.warmup import Steps, make_schedule
from jaxddp.training.plan import Plan

PEAK = 0.8


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


# --- Schedules ---


def test_cosine_ends_at_zero():
    schedule = make_schedule(config_of(learning_rate=PEAK), Steps(100, 5))
    assert float(schedule(5)) == pytest.approx(PEAK)
    assert 0 < float(schedule(99)) < 1e-3 * PEAK
    assert float(schedule(100)) == float(schedule(10**6)) == 0


@pytest.mark.slow
def test_one_cycle_equals_optaxs_schedule_after_the_warm_up():
    """The warm-up of 60 of 200 steps is that of the paper's policy."""
    learning_rates = rates(200, 60, PEAK, schedule="one_cycle")
    optax_schedule = optax.linear_onecycle_schedule(200, PEAK)
    np.testing.assert_allclose(learning_rates[60:], [optax_schedule(step) for step in range(60, 200)], rtol=1e-5)


# --- The peak for another batch size ---


@pytest.mark.parametrize(
    ("scaling", "peak", "line"),
    [
        ("linear", 0.4, "learning rate 0.4 = 0.1 x 1024 / 256 (linear, for optimizer.reference_batch=256)"),
        ("sqrt", 0.2, "learning rate 0.2 = 0.1 x sqrt(1024 / 256) (sqrt, for optimizer.reference_batch=256)"),
        ("none", 0.1, None),
    ],
)
def test_the_peak_follows_the_batch_size(scaling, peak, line):
    config = config_of(reference_batch=256, scaling=scaling).replace(train={"batch_size": 1024})
    assert float(make_schedule(config, Steps(30, 3))(2)) == pytest.approx(peak)
    assert at_batch_size(config).optimizer.learning_rate == pytest.approx(peak)
    assert at_batch_size(at_batch_size(config)) == at_batch_size(config)
    assert derivation(config) == line


def test_a_config_without_a_reference_batch_size_keeps_its_peak():
    config = Config()
    assert at_batch_size(config) is config and batch_factor(config) == 1 and derivation(config) is None


def test_a_peak_out_of_range_raises_a_one_line_error():
    config = config_of(learning_rate=1e6, reference_batch=1)
    with pytest.raises(InputError, match="optimizer.learning_rate=256000000.0: expected 0 to 1,000,000"):
        make_schedule(config, Steps(10, 1))


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_step_schedule_falls_at_its_shares_of_the_run(warmup):
    learning_rates = rates(90, warmup, PEAK, schedule="step", step_at=(1 / 3, 2 / 3, 8 / 9), step_factor=0.1)
    expected = PEAK * np.repeat([1, 0.1, 0.01, 0.001], [30, 30, 20, 10])
    np.testing.assert_allclose(learning_rates[warmup:], expected[warmup:], rtol=1e-6)


def test_a_warm_up_may_be_as_long_as_the_run_but_not_longer():
    assert rates(10, 10, PEAK)[-1] == pytest.approx(PEAK)
    config = config_of(warmup="11 steps")
    with pytest.raises(
        InputError, match='optimizer.warmup="11 steps" is 11 steps, longer than the run of 10; shorten it'
    ):
        make_schedule(config, Steps(10, 11))


def test_a_warm_up_in_percent_keeps_its_share_of_a_short_run_and_has_at_least_one_step():
    warmup = Config().optimizer.warmup
    for total, steps in ((1000, 50), (10, 1), (1, 1)):
        assert warmup.steps(num_examples=100, batch_size=10, total_steps=total) == steps


@pytest.mark.parametrize(("name", "nearest"), [("cosin", "cosine"), ("steps", "step"), ("const", "constant")])
def test_an_unknown_schedule_gets_the_nearest_name_as_a_suggestion(name, nearest):
    with pytest.raises(InputError, match=f"optimizer.schedule='{name}' is unknown; did you mean '{nearest}'"):
        make_schedule(config_of(schedule=name), Steps(10, 1))


@pytest.mark.parametrize(("name", "nearest"), [("adam", "adamw"), ("momentun", "momentum")])
def test_an_unknown_optimizer_gets_the_nearest_name_as_a_suggestion(name, nearest):
    with pytest.raises(InputError, match=f"optimizer.name='{name}' is unknown; did you mean '{nearest}'"):
        make_optimizer(config_of(name=name), optax.constant_schedule(0.1))


def test_absent_settings_take_the_optimizers_defaults():
    assert settings_of(Config().optimizer, SgdSettings) == SgdSettings(momentum=0.0, nesterov=False)
    section = config_of(momentum=0.8, nesterov=True).optimizer
    assert settings_of(section, SgdSettings) == SgdSettings(momentum=0.8, nesterov=True)
    # SGD without momentum has no buffer.
    state = make_optimizer(config_of(name="sgd"), optax.constant_schedule(0.1)).init(parameters())
    assert all(leaf.ndim == 0 for leaf in jax.tree.leaves(state))


def test_a_run_of_no_steps_is_refused():
    with pytest.raises(InputError, match='train.duration="0 epochs" is less than one step; give at least "1 step"'):
        Plan.of(Config().replace(train={"duration": "0 epochs"}), 100)


def test_a_run_of_more_steps_than_the_state_can_count_is_refused():
    assert Plan.of(Config().replace(train={"duration": "2147483647 steps"}), 100).total_steps == 2**31 - 1
    with pytest.raises(InputError, match='"2147483648 steps" is 2,147,483,648 steps; at most 2,147,483,647'):
        Plan.of(Config().replace(train={"duration": "2147483648 steps"}), 100)


# --- Optimizers ---


def test_weight_decay_applies_to_kernels():
    assert decay_mask(parameters()) == {
        "conv": {"kernel": True},
        "norm": {"scale": False, "bias": False},
        "head": {"kernel": True, "bias": False},
    }


def test_the_training_script_decays_only_kernels():
    script = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "main.py"))
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2), "bias": jnp.ones(2)}
    optimizer = script["make_optimizer"](1.0)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert {name for name, update in updates.items() if update.any()} == {"kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), [("vit_ti16", 12 * 4 + 2), ("swin_t", 12 * 4 + 3 + 2)])
def test_only_kernels_of_a_transformer_are_decayed(name, kernels):
    model = MODELS.get(name)(Config(), 10)
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    decayed = [
        path for path, is_decayed in traverse_util.flatten_dict(decay_mask(params), sep="/").items() if is_decayed
    ]
    assert len(decayed) == kernels and all(path.endswith("/kernel") for path in decayed)


def test_the_optimizer_of_a_config_uses_its_schedule():
    """With a gradient of one, plain SGD moves by the sum of the learning rates."""
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


def test_the_step_schedule_falls_once_for_each_share_even_in_a_short_run():
    """In a run of three steps both shares are step 2."""
    learning_rates = rates(3, 0, PEAK, schedule="step", step_at=(0.6, 0.7), step_factor=0.5)
    np.testing.assert_allclose(learning_rates, [PEAK, PEAK, PEAK / 4], rtol=1e-6)
