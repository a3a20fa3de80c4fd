"""Tests of single optimizers and the schedule-free average; `conformance/test_optimizers.py` tests all optimizers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support.data import random_table
from support.networks import SmallNet, largest_difference, linear_model, randomized
from support.optimizers import assert_equal, config_of, rate, updated
from support.runs import copy_setup, setup_of

import jaxddp
from jaxddp.config import Config
from jaxddp.config.registry import OPTIMIZERS
from jaxddp.core.errors import InputError
from jaxddp.engine.optimizer import compute_average, thawing, with_factors
from jaxddp.engine.parts.averages import ScheduleFreeAverage

TABLE, VAL = random_table(50), random_table(23, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("nesterov", "of_bias"), [(False, 1), (True, 0.9 * 0.1 / (1 - 0.9**2) + 1)])
def test_muon_scales_updates_of_kernels_to_the_usual_size_of_adams_updates(nesterov, of_bias):
    """A kernel's updates have a root mean square of 0.2, usual for Adam. A bias takes Adam's or NAdam's first step."""
    optimizer = OPTIMIZERS.get("muon")(config_of(name="muon", weight_decay=0.0, nesterov=nesterov), lambda step: 1.0)
    params = {"wide": jnp.zeros((8, 64)), "conv": jnp.zeros((3, 3, 8, 16)), "bias": jnp.zeros(32)}
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    rms = jax.tree.map(lambda u: float(jnp.sqrt(jnp.mean(u**2))), updates)
    assert 0.1 < rms["wide"] < 0.3 and 0.1 < rms["conv"] < 0.3 and rms["bias"] == pytest.approx(of_bias, abs=1e-3)


def test_schedule_free_cannot_be_combined_with_another_average():
    optimizer = contrib.schedule_free_sgd(0.1)
    for key, value in (("ema", 0.9), ("swa", "50%"), ("lookahead", 3)):
        with pytest.raises(InputError, match=f"^{key}: a schedule-free optimizer averages .*; leave one of them out"):
            jaxddp.prepare_training(linear_model(), random_table(50), 2, optimizer, 4, **{key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "optimizer.schedule='cosine': schedule_free averages its steps instead of lowering the learning rate"),
        ({"schedule": "constant", "momentum": 0.0}, "optimizer.momentum=0.0: schedule_free divides by the momentum;"),
    ],
)
def test_unsupported_settings_of_schedule_free_raise_a_one_line_error(change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        OPTIMIZERS.get("schedule_free")(config_of(name="schedule_free", **change), rate)


@pytest.mark.slow
def test_the_longest_matching_layer_prefix_decides(float64):
    config = config_of(name="adamw", weight_decay=0.4, groups=["head:decay=0.1", "head.kernel:decay=0.2"])
    assert_equal(updated(config, 2)["head"], updated(config_of(name="adamw", weight_decay=0.2), 2)["head"])


def make_setup(optimizer, devices: int = 1, net=None, **options):
    net = net or SmallNet(batch_norm=True, sync="data")
    setup = setup_of(net, optimizer, TABLE, devices=devices, seed=5, **options)
    params = randomized(setup.state.params)
    state = setup.state.replace(params=params, opt_state=setup.optimizer.init(params))
    return dataclasses.replace(setup, state=setup.topology.replicate(state))


@pytest.fixture(scope="module")
def averaging():
    """Return a setup with a schedule-free optimizer, a frozen layer, and a learning rate by layer."""
    config = Config().replace(
        model={"freeze": "Conv_0"}, optimizer={"groups": ["Dense_0.bias:rate=0.5"]}, parallel={"self_test": "never"}
    )
    optimizer = optax.chain(optax.clip(1.0), contrib.schedule_free_adamw(0.05, warmup_steps=2))
    return make_setup(optimizer, 2, config=config)


@pytest.mark.ci
def test_evaluation_measures_the_average_which_is_added_automatically(averaging):
    setup, state = averaging, copy_setup(averaging).state
    assert [type(part) for part in setup.parts] == [ScheduleFreeAverage]
    for batch in setup.batches(0, 5):
        state, _ = setup.step()(state, batch)
    (_, inner), params = state.opt_state, state.params
    z, trained = inner.z, {"Dense_0": params["Dense_0"], "BatchNorm_0": params["BatchNorm_0"]}
    assert z["Conv_0"]["kernel"] is None
    expected = contrib.schedule_free_eval_params(inner._replace(z={name: z[name] for name in trained}), trained)
    average = jax.device_get(state.eval_params)
    assert largest_difference({name: average[name] for name in trained}, jax.device_get(expected)) < 1e-6
    assert largest_difference(average["Conv_0"], jax.device_get(params["Conv_0"])) == 0
    assert largest_difference(average["Dense_0"], jax.device_get(params["Dense_0"])) > 1e-4
    swapped = state.replace(params=state.eval_params, parts={})
    evaluator = setup.evaluator(VAL)
    assert evaluator(state) == evaluator(swapped) != evaluator(state.replace(parts={}))


def scaled_schedule_free(factor):
    """Return schedule-free Adam whose base optimizer multiplies updates by `factor` of array name and step."""

    def by_layer():
        def update(updates, count, params=None):
            scaled = jax.tree_util.tree_map_with_path(lambda path, u: u * factor(path[0].key, count), updates)
            return scaled, count + 1

        return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)

    base = optax.chain(optax.scale_by_rms(0.999, 1e-8, eps_in_sqrt=False, bias_correction=True))
    return contrib.schedule_free(optax.chain(base, optax.scale_by_learning_rate(rate), by_layer()), rate)


SCHEDULE_FREE = contrib.schedule_free_adamw(rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outside", "factor"),
    [
        (with_factors(SCHEDULE_FREE, {"a/b": 0.3}), lambda name, step: 0.3 if name == "a" else 1),
        (thawing(SCHEDULE_FREE, {"a/b": 3}), lambda name, step: jnp.where(step < 3, 0, 1) if name == "a" else 1),
    ],
)
def test_learning_rates_by_layer_scale_schedule_free_steps(outside, factor, float64):
    """A factor on the updates of y also scales the updates of z, so the average is that of the scaled updates."""
    rng = np.random.default_rng(0)
    params = {"a": {"b": jnp.asarray(rng.normal(size=(3, 2)))}, "c": jnp.asarray(rng.normal(size=4))}
    inside, outer, inner = scaled_schedule_free(factor), params, params
    outer_state, inner_state = outside.init(params), inside.init(params)
    for step in range(6):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
        updates, outer_state = outside.update(grads, outer_state, outer)
        outer = optax.apply_updates(outer, updates)
        updates, inner_state = inside.update(grads, inner_state, inner)
        inner = optax.apply_updates(inner, updates)
        assert largest_difference(outer, inner) < 1e-12
        assert largest_difference(compute_average(outer_state, outer), compute_average(inner_state, inner)) < 1e-12
        if not factor("a", step):
            assert outer["a"]["b"].tobytes() == params["a"]["b"].tobytes()


def test_a_schedule_from_python_multiplies_schedule_free_steps():
    setup = make_setup(contrib.schedule_free_sgd(0.1), net=linear_model())
    halved = setup.changed(schedule=lambda step: 0.5)
    batch, before = next(setup.batches(0, 1)), np.asarray(setup.state.params["weight"])
    (full, _), (half, _) = (prepared.step()(copy_setup(setup).state, batch) for prepared in (setup, halved))
    for tree in (lambda state: state.params, lambda state: state.opt_state.z, lambda state: state.eval_params):
        half_change, full_change = (np.asarray(tree(state)["weight"]) - before for state in (half, full))
        assert largest_difference(2 * half_change, full_change) < 1e-6 and np.abs(half_change).max() > 1e-3
