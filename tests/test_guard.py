"""A step whose gradient is not finite changes nothing on any device. Too many bad steps in a row end the run, with an
error that names their rows."""

import dataclasses
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import rare_case
from support.data import NO_AUGMENTATION, random_table
from support.faults import poisoned, spoil
from support.networks import SmallNet, linear_model
from support.peers import Second
from support.runs import Recorder, setup_of, train
from support.shared import sgd

import jaxddp
from jaxddp.config import Config
from jaxddp.core.errors import InputError, NonFiniteError, Preempted
from jaxddp.core.peers import ALONE
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.parts.averages import ParameterAverage
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.guard import SKIPPED, Guard
from jaxddp.mesh import Topology
from jaxddp.setup.run_training import make_run
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.epoch_sums import EpochSums, SkippedSteps, TooManySkipped

TABLE, GUARD = random_table(50), Guard()
NET = SmallNet(batch_norm=True, sync="data")


def make_setup(table, devices: int = 4, parts=(GUARD,), **more):
    more = {"data": NO_AUGMENTATION, "parts": parts, "augmentation": spoil, "seed": 5} | more
    return setup_of(NET, sgd(0.05, momentum=0.9), table, devices=devices, **more)


def step_of(setup, row: int) -> int:
    """Return the first step, from 0, whose batch contains a row."""
    return next(step for step in range(100) if row in setup.feed.order.rows(step))


LAYOUTS = [(devices, cache) for devices in (1, 2, 4) for cache in ("none", "device")]
ESSENTIAL = {(1, "none"), (4, "device")}


@pytest.mark.parametrize(
    ("devices", "cache"), [layout if layout in ESSENTIAL else rare_case(*layout) for layout in LAYOUTS]
)
def test_a_bad_step_changes_nothing(devices, cache):
    """One device has a NaN in its images. Parameters, statistics, optimizer and averages stay equal on all devices."""
    data = dataclasses.replace(NO_AUGMENTATION, cache=cache)
    setup = make_setup(poisoned(7), devices, (ParameterAverage(0.9), GUARD), data=data)
    bad_step, step, state = step_of(setup, 7), setup.step(), setup.state
    states = [jax.device_get(state)]
    for batch in setup.batches(0, bad_step + 2):
        state, sums = step(state, batch)
        states.append(jax.device_get(state))
        assert sums.means()["skipped"] == (len(states) - 2 == bad_step)
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        assert int(after.step) == number + 1
        same = jax.tree.map(np.array_equal, before.replace(step=0), after.replace(step=0))
        compared = same if number == bad_step else (same.params, same.eval_params)
        assert {*jax.tree.leaves(compared)} == {number == bad_step}
    for device in range(devices):
        local_state = jax.tree.map(lambda leaf, device=device: np.asarray(leaf.addressable_data(device)), state)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, local_state, states[-1])))


def test_a_run_continues_without_the_bad_step_and_logs_it(caplog):
    records, changes = Recorder(), {"train": {"duration": "2 epochs"}, "log": {"every": "1 step"}}
    with caplog.at_level(logging.WARNING, "jaxddp.training"):
        state = train(make_setup(poisoned(7)), changes, listeners=[records])
    losses = [record.metrics["loss"] for record in records.steps]
    bad_steps = [number for number, loss in enumerate(losses, start=1) if np.isnan(loss)]
    # 50 examples in batches of 8 are 13 steps of two epochs, and each epoch contains the row once.
    assert len(losses) == 13 and len(bad_steps) == 2 and bad_steps[0] == step_of(make_setup(TABLE), 7) + 1
    assert [message for message in caplog.messages if "was skipped" in message] == [
        f"step {step}: the loss is nan, so the step was skipped; 1 of at most 10 in a row" for step in bad_steps
    ]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))
    ends = [record.epoch_end for record in records.steps if record.epoch_end]
    # The mean of an epoch excludes skipped steps.
    first = [record.metrics["loss"] for record in records.steps[:7] if np.isfinite(record.metrics["loss"])]
    assert ends[0].metrics["loss"] == pytest.approx(np.mean(first), rel=1e-6)
    assert all("skipped" not in record.metrics for record in records.steps)


@pytest.mark.slow
def test_too_many_bad_steps_in_a_row_end_the_run_with_a_message_naming_their_rows(tmp_path):
    """Only checkpoints from before the first bad step are kept."""
    rows = make_setup(TABLE).feed.order.rows(5)
    setup = make_setup(poisoned(int(rows[2]), int(rows[6])))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints, pytest.raises(NonFiniteError) as raised:
        changes = {"duration": "12 steps", "max_bad_steps": 1}
        train(setup, {"train": changes, "checkpoint": {"every": "2 steps"}}, checkpoints=checkpoints)
    first = min(step_of(setup, int(rows[2])), step_of(setup, int(rows[6])))
    bad_rows = [int(row) for row in setup.feed.order.rows(first) if row in (rows[2], rows[6])]
    description = f"row{'s' if len(bad_rows) > 1 else ''} {', '.join(map(str, bad_rows))} of the training data"
    assert str(raised.value) == (
        f"step {first + 1}: 1 step had no finite gradient, as many as train.max_bad_steps=1. "
        f"Lower the learning rate, or lengthen its warm-up. The loss is not finite for {description}"
    )
    assert checkpoints.steps() == [step for step in (2, 4) if step <= first][-2:]


def test_an_error_names_an_image_whose_nan_the_network_hides():
    """A ReLU can hide a NaN on a CPU, where XLA computes the maximum of NaN and 0 as 0."""

    def apply(params, images):
        return jnp.nan_to_num(images).reshape(len(images), -1)[:, :5] * params["weight"]

    model = (lambda key, example: {"weight": jnp.ones(5)}), apply
    rows = make_setup(TABLE).feed.order.rows(0)
    setup = setup_of(model, sgd(0.1), poisoned(int(rows[3])), devices=2, parts=(GUARD,), augmentation=spoil, seed=5)
    message = make_run(setup).suspects(setup.state, 1)
    assert message == f"Images are not finite after augmentation: row {rows[3]} of the training data"


def test_bad_steps_in_a_row_are_counted_across_a_resume(tmp_path):
    table, changes = poisoned(*range(50)), {"train": {"duration": "12 steps", "max_bad_steps": 6}}
    changes |= {"log": {"every": "1 step"}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        with pytest.raises(Preempted):
            train(make_setup(table), changes, checkpoints=checkpoints, should_stop=lambda step: step == 4)
        with pytest.raises(NonFiniteError, match="^step 6: 6 steps in a row, from step 1,"):
            train(make_setup(table), changes, checkpoints=checkpoints, resume_step=4)


def test_the_guard_is_active_by_default_and_can_be_switched_off():
    assert configured_parts(Config(), 10) == (GUARD,)
    assert configured_parts(Config().replace(train={"max_bad_steps": 0}), 10) == ()
    setup = jaxddp.prepare_training(linear_model(), TABLE, 1, sgd(0.1), 5)
    assert setup.parts == (GUARD,) and setup.state.parts == {}


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_only_bad_steps_in_a_row_count(skipped, limit):
    counter, longest, in_a_row = SkippedSteps(limit), 0, 0
    try:
        for step, is_bad in enumerate(skipped, start=1):
            in_a_row = in_a_row + 1 if is_bad else 0
            longest = max(longest, in_a_row)
            assert counter.count_step(step, {"loss": np.nan if is_bad else 1.0, "skipped": float(is_bad)}) != is_bad
            assert counter.in_a_row == in_a_row
    except TooManySkipped as error:
        assert f"{error}".startswith(f"step {step}: ") and in_a_row == limit
    else:
        assert longest < limit


@pytest.mark.parametrize("peers", [ALONE, Second()])
def test_process_0_logs_which_step_was_skipped(peers, caplog):
    SkippedSteps(peers=peers).count_step(7, {"loss": np.nan, "skipped": 1.0})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["step 7"] * peers.is_first


def sums_of(skipped: float, **metrics: float) -> MetricSums:
    """Return the metrics of a step of 8 examples."""
    rows = [[8 * value, 8.0] for value in metrics.values()]
    return MetricSums(jnp.array([*rows, [skipped, 1.0], [8.0, 1.0]]), (*metrics, SKIPPED))


def epoch_sums(saved: Any) -> EpochSums:
    way, plan = SimpleNamespace(stacked=1, fetch=jax.device_get), SimpleNamespace(max_bad_steps=9, max_substituted=0)
    run: Any = SimpleNamespace(progress=saved, plan=plan, way=way, topology=Topology.create(1))
    return EpochSums(run)


def test_scalars_of_a_skipped_step_are_not_in_the_epochs_mean():
    """A loss scale can make the gradient norm of a step infinite while the loss is finite."""
    sums = epoch_sums({})
    sums.add(range(1, 2), sums_of(1, loss=3.0, gradient_norm=np.inf, loss_scale=4.0))
    sums.add(range(2, 3), sums_of(0, loss=1.0, gradient_norm=5.0, loss_scale=4.0))
    assert sums.fetch()["gradient_norm"] == 5
    assert sums.end_epoch() == {"loss": 2.0, "gradient_norm": 5.0, "loss_scale": 4.0}
    sums.add(range(3, 4), sums_of(1, loss=np.nan, substituted=1 / 8))
    with pytest.raises(InputError, match="^step 3: 1 image of this epoch was substituted, and data.max_bad_images"):
        sums.fetch()


def test_the_sums_of_a_resumed_epoch_are_those_of_the_same_names():
    before = epoch_sums({})
    before.add(range(1, 2), sums_of(0, loss=3.0, value=2.0, top1=0.5))
    before.fetch()
    resumed = epoch_sums(before.saved)
    resumed.add(range(2, 3), sums_of(0, loss=1.0, top1=1.0, other=7.0))
    resumed.fetch()
    assert resumed.end_epoch() == {"loss": 2.0, "top1": 0.75, "other": 7.0}


def test_a_skipped_step_counts_if_its_loss_is_not_finite_or_its_loss_scale_is_below_1():
    counter, skipped = SkippedSteps(3), {"loss": 1.0, "skipped": 1.0, "loss_scale": 1.0}
    for step in range(1, 10):
        assert counter.count_step(step, skipped) and counter.in_a_row == 0
    assert counter.count_step(10, skipped | {"loss_scale": 0.5}) and counter.in_a_row == 1
    assert not counter.count_step(11, skipped | {"loss": np.inf}) and counter.in_a_row == 2
    with pytest.raises(TooManySkipped):
        counter.count_step(12, skipped | {"loss_scale": 0.25})
