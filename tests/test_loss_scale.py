"""The loss scale for float16 follows Flax's rule, and a step that overflows changes only the scale."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given
from hypothesis import strategies as st
from support.cases import essential_and_rare
from support.data import NO_AUGMENTATION, random_table
from support.runs import setup_of
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.guard import Guard, LossScale
from jaxddp.models.resnet import BASIC, Architecture, ResNet
from jaxddp.schedules import Steps

TABLE = random_table(48, image=8)


FLOAT16_RESNET = ResNet(Architecture((1,), BASIC), 5, width=2, stem="small", dtype="float16")


def make_setup(devices: int = 2, model: Any = FLOAT16_RESNET, **scale: Any):
    parts = (Guard(), LossScale(16, **scale)) if scale else ()
    return setup_of(
        model, sgd(0.05, momentum=0.9), TABLE, devices=devices, batch_size=16, parts=parts, data=NO_AUGMENTATION
    )


@pytest.mark.slow
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.sampled_from([1.0, 2.0**126, 2.0**-125]))
def test_the_loss_scale_follows_flaxs_rule(are_finite, interval, initial):
    loss_scale, train_state = LossScale(1, initial, growth_interval=interval), object()
    flax_scale: Any = DynamicScale(growth_interval=interval, scale=initial)
    scale_state = loss_scale.init(None, None)
    for is_finite in are_finite:
        scale_state, returned_state = loss_scale.judge(scale_state, train_state, train_state, jnp.array(is_finite))
        flax_scale = flax_scale.value_and_grad(lambda x, ok=is_finite: x * (1.0 if ok else jnp.nan))(1.0)[0]
        assert returned_state is train_state
        assert float(scale_state["scale"]) == float(flax_scale.scale)
        assert int(scale_state["finite_steps"]) == int(flax_scale.fin_steps)
        assert loss_scale.report(scale_state, None)["loss_scale"] == scale_state["scale"]


def test_the_loss_scale_multiplies_the_mean_loss():
    """The step differentiates the sum of 16 losses, so the scale 8 becomes 8 / 16."""
    scale = LossScale(16, initial=8.0)
    assert scale.loss_scale(scale.init(None, None)) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((2,), 1, 4))
def test_a_step_that_overflows_halves_the_scale_and_changes_nothing_else(devices):
    setup = make_setup(devices, initial=2.0**30, growth_interval=2)
    step, state, scales = setup.step(), setup.state, [2.0**30]
    for batch in setup.batches(0, 24):
        before = jax.device_get(state)
        state, sums = step(state, batch)
        after, means = jax.device_get(state), sums.means()
        is_equal = jax.tree.map(np.array_equal, before, after.replace(step=before.step, parts=before.parts))
        scales.append(means["loss_scale"])
        assert np.isfinite(means["loss"])
        if means["skipped"]:
            assert all(jax.tree.leaves(is_equal)) and scales[-1] == scales[-2] / 2
        else:
            assert not all(jax.tree.leaves(is_equal.params)) and not all(jax.tree.leaves(is_equal.model_state))
            assert scales[-1] in (scales[-2], 2 * scales[-2])
    decreases = [after < before for before, after in itertools.pairwise(scales)]
    # The scale falls until no step overflows in float16, and then rises and falls around that value.
    assert decreases[:3] == [True] * 3 and not all(decreases) and any(b > a for a, b in itertools.pairwise(scales))


@pytest.mark.slow
def test_a_tiny_loss_scale_does_not_divide_zero_by_zero():
    """The guard checks gradients before the division by the scale, so it would not detect the NaN of 0 / 0."""
    setup = make_setup(2, initial=float(jnp.finfo(jnp.float32).tiny))
    state, sums = setup.step()(setup.state, next(setup.batches(0, 1)))
    assert not sums.means()["skipped"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))


def test_the_loss_scale_keeps_gradients_that_are_too_small_for_float16():
    """A gradient of 2^-26 is 0 in float16."""

    def init(key, example):
        return {"weight": jnp.zeros((example[0].size, 5))}

    def apply(params, images):
        # The backward pass of these casts converts the gradient to float16 and back.
        logits = images.reshape(len(images), -1) @ params["weight"]
        return logits.astype(jnp.float16).astype(jnp.float32) * 2.0**-26

    largest_weights = []
    for scale in ({}, {"initial": 65536.0}):
        setup = make_setup(2, (init, apply), **scale)
        state, _ = setup.step()(setup.state, next(setup.batches(0, 1)))
        largest_weights.append(float(jnp.abs(state.params["weight"]).max()))
    assert largest_weights[0] == 0 < largest_weights[1]


def test_float16_adds_the_guard_even_if_max_bad_steps_is_0():
    config = Config().replace(train={"precision": "float16", "max_bad_steps": 0, "batch_size": 32})
    assert configured_parts(config, Steps(10, 0)) == (Guard(), LossScale(32))


@pytest.mark.parametrize(("key", "value"), [("batch_size", 0), ("initial", 0), ("factor", 1), ("growth_interval", 0)])
def test_invalid_settings_of_the_loss_scale_raise_a_one_line_error(key, value):
    with pytest.raises(InputError, match=f"^LossScale: {key}={value}.*: expected"):
        dataclasses.replace(LossScale(8), **{key: value})
