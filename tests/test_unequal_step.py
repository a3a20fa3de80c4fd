"""Slices of different sizes: the gradient and the run equal those of one device, and padding costs no computation."""

import dataclasses
import functools
import json
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import ci_case, rare_case
from support.data import CLASSES, NO_AUGMENTATION, random_batch, random_table
from support.faults import poisoned, spoil
from support.networks import SmallNet, drawing_model, fresh_state, largest_difference, linear_model, objective_of
from support.runs import Recorder, setup_of, train
from support.shared import sgd, shared, topology_of

import jaxddp
import jaxddp.setup.measured_shares as measured_shares
from jaxddp.api import prepare_training, resnet
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.core.errors import InputError, NonFiniteError
from jaxddp.engine.parts.averages import ParameterAverage
from jaxddp.engine.parts.guard import GradientNorm, Guard, LossScale
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.unequal import Unequal
from jaxddp.engine.ways.way import Way
from jaxddp.setup.measured_shares import SHARES_FILE, settle_shares
from jaxddp.setup.run_training import make_run

STEPS, BATCH = 20, 16
TABLE = random_table(50)
CHANGES = {"train": {"duration": f"{STEPS} steps"}, "log": {"every": "5 steps"}, "eval": {"every": "0 steps"}}


def weighted(logits, labels):
    """Return the sum of the losses and of the weights, as for a loss with class weights."""
    weights = (1 + labels).astype(logits.dtype)
    return (weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels)).sum(), weights.sum()


def make_setup(shares: str | None, devices: int = 1, net: Any = None, table: Any = TABLE, **more: Any) -> Any:
    parallel = {"self_test": "never", "shares": shares}
    config = Config().replace(parallel=parallel, **more.pop("config", {}))
    words = {"devices": devices, "config": config, "batch_size": BATCH, "data": NO_AUGMENTATION, "seed": 3, **more}
    return setup_of(net or SmallNet(dtype=jnp.zeros(()).dtype.type), sgd(0.1), table, **words)


@functools.cache
def trained(shares: str | None, devices: int, case: str) -> Any:
    """Return the state after a run, and the metrics of its records."""
    listener, words = Recorder(), CASES[case]
    state = train(make_setup(shares, devices, **words), CHANGES, listeners=[listener])
    return jax.device_get(state), [dict(record.metrics) for record in listener.steps]


GROWTH: dict[str, Any] = {"crop": "whole", "grow_by": 2, "grow_start": "1 epoch", "grow_end": "2 epochs"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "images on the devices": {"data": dataclasses.replace(NO_AUGMENTATION, cache="device")},
    "microbatches": {"config": {"train": {"accumulate": 2}}},
    "all parts": {"parts": (GradientNorm(0.5), ParameterAverage(0.9), Guard(), LossScale(8))},
    "growing images": {
        "data": DataConfig(augment=AugmentConfig(flip=False), grow_from=4, image_size=6, resize=6, **GROWTH)
    },
    "frozen": {"config": {"model": {"freeze": "Conv_0"}}},
    "microbatches, mixup, weighted loss": {
        "config": {"train": {"accumulate": 2}},
        "data": DataConfig(augment=AugmentConfig(flip=True, mixup=0.4)),
        "loss": weighted,
        "parts": (Guard(), LossScale(8)),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "devices", "case"),
    [
        ci_case("3,1", 2, "plain"),
        ("1,2,4,1", 4, "images on the devices"),
        ("5,2,1", 3, "all parts"),
        ci_case("3,1", 2, "microbatches, mixup, weighted loss"),
        ("3,1", 2, "microbatches"),
        *(rare_case("3,1", 2, case) for case in CASES if case not in ("plain", "microbatches")),
        *(rare_case("1,2,4,1", 4, case) for case in CASES),
    ],
)
def test_a_run_with_unequal_slices_equals_a_run_on_one_device(float64, shares, devices, case):
    (state, metrics), (expected, expected_metrics) = trained(shares, devices, case), trained(None, 1, case)
    assert largest_difference(state, expected) < 1e-9
    assert largest_difference(metrics, expected_metrics) < 1e-9


def test_a_built_in_network_trains_with_unequal_slices():
    """Its convolutions have custom gradients. Those of images must not be summed over the devices of a group."""
    setup = make_setup("3,1", 2, net=resnet("resnet10", CLASSES, width=2))
    program, _ = setup.program()
    program.check(setup.state, setup.feed.abstract_batch(), setup.key)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.integers(0, 4), st.integers(0, 99))
def test_the_gradient_is_exact_for_any_sizes_and_padding(sizes, masked, seed):
    """The last `masked` examples of the batch are padding, in addition to the padding of the slots."""
    with jax.enable_x64(True):
        objective, optimizer, topology = objective_of(linear_model()), sgd(1.0), topology_of(len(sizes))
        batch = random_batch(sum(sizes), masked=min(masked, sum(sizes) - 1), seed=seed)
        unequal = Unequal(topology, counts=tuple(sizes)).program(Phases(objective, optimizer))
        starts = np.cumsum([0, *sizes])
        slots = np.full((len(sizes), max(sizes)), -1)
        for slot, start, size in zip(slots, starts, sizes, strict=False):
            slot[:size] = np.arange(start, start + size)
        # The padding of a slot is noise: the first example again, unmasked.
        padded = jax.tree.map(lambda column: column[np.maximum(slots.reshape(-1), 0)], batch)
        key = topology.replicate(jax.random.key(0))
        state, sums = unequal(fresh_state(objective, optimizer, topology), topology.place(padded), key)
        one = topology_of(1)
        step = Way(one).step(Phases(objective, optimizer))
        expected, expected_sums = step(fresh_state(objective, optimizer, one), one.place(batch))
        assert largest_difference(jax.device_get(state.params), jax.device_get(expected.params)) < 1e-9
        np.testing.assert_allclose(sums.values, expected_sums.values, rtol=1e-9)


class Mean(nn.Module):
    """A network with a running mean of its images, and a counter."""

    @nn.compact
    def __call__(self, images, train: bool):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros((), images.dtype))
        count = self.variable("counters", "steps", lambda: jnp.zeros((), jnp.int32))
        if train:
            mean.value, count.value = images.mean(), count.value + 1
        return nn.Dense(CLASSES, param_dtype=images.dtype)(images.reshape(len(images), -1))


@pytest.mark.slow
def test_model_states_are_averaged_with_the_sizes_as_weights():
    means = []
    for shares, devices in ((None, 1), ("5,2,1", 3)):
        setup = make_setup(shares, devices, Mean())
        state, _ = setup.step()(setup.state, next(setup.batches(0, 1)))
        means.append(float(state.model_state["batch_stats"]["mean"]))
        assert int(state.model_state["counters"]["steps"]) == 1
    assert means[0] == pytest.approx(means[1], rel=1e-5)


@pytest.mark.slow
def test_no_two_devices_draw_the_same_numbers():
    """If two devices drew the same numbers, the mean of the squares of the draws would be the square of their mean."""
    # Two of the devices share a program.
    setup = make_setup("1,1,2", 3, drawing_model())
    state, _ = setup.step()(setup.state, next(setup.batches(0, 1)))
    first = jax.device_get(state.model_state)
    assert first["squared"] - np.square(first["drawn"]) > 1e-3


@pytest.mark.slow
def test_nothing_is_computed_for_padding():
    """The FLOPs are those of one device, and those of each program are proportional to its slices."""
    programs, flops = [], []
    for setup in (make_setup("6,1,1", 3), make_setup(None)):
        program, _ = setup.program()
        programs.append(program.prepare(setup.state, setup.feed.abstract_batch(), setup.key))
        assert program.cost.flops > 0
        flops.append(setup.program()[0].cost.flops)
    assert flops[0] == flops[1]
    large, small = (program.cost_analysis()["flops"] for program in programs[0].gradients)
    assert [len(team.places) for team in programs[0].teams] == [1, 2]
    assert large == pytest.approx(6 * small, rel=0.1)
    # Only the update communicates, in one message.
    texts = [program.as_text() for program in programs[0].gradients]
    assert not any("all-reduce" in text for text in texts)
    assert programs[0].update.as_text().count(" all-reduce(") == 1


@pytest.mark.slow
def test_an_error_names_the_rows_of_a_batch_with_slots():
    rows = make_setup("1,3", 2).feed.order.rows(0)
    setup = make_setup("1,3", 2, table=poisoned(int(rows[5])), augmentation=spoil)
    message = make_run(setup).suspects(setup.state, 1)
    assert message == f"The loss is not finite for row {rows[5]} of the training data"
    setup = make_setup("1,3", 2, table=poisoned(int(rows[5])), augmentation=spoil, parts=(Guard(),))
    with pytest.raises(NonFiniteError, match=f"row {rows[5]} of the training data$"):
        train(setup, {"train": {"duration": "2 steps", "max_bad_steps": 1}})


def test_a_network_that_communicates_raises_a_one_line_error():
    class Synchronized(nn.Module):
        @nn.compact
        def __call__(self, images, train: bool):
            x = nn.BatchNorm(not train, axis_name="data")(images.reshape(len(images), -1))
            return nn.Dense(CLASSES)(x)

    match = r"^parallel.shares: the network or the loss communicates between devices \(\w+\), but each device computes "
    with pytest.raises(InputError, match=match + "its gradient separately; remove it, for example a batch norm with"):
        train(make_setup("3,1", 2, Synchronized()), CHANGES)


def run(shares: Any, workdir: Any, epochs: int, devices: int = 2, **more: Any) -> Any:
    setup = prepare_training(SmallNet(), TABLE, devices, sgd(0.1), BATCH // devices, shares=shares, seed=3)
    words = {"epochs": epochs, "workdir": workdir, "listeners": (), "self_test": "never", **more}
    return jax.device_get(jaxddp.train(jaxddp.softmax_cross_entropy, shared(setup), **words)[0])


@pytest.fixture
def speeds(monkeypatch):
    """Replace the measured speeds by the numbers in a list, and count the measurements."""
    numbers, calls = [300.0, 100.0], []

    def measure(setup):
        calls.append(setup)
        return tuple(numbers[: setup.topology.num_devices])

    monkeypatch.setattr("jaxddp.setup.measured_shares.measure_shares", measure)
    return numbers, calls


@pytest.mark.slow
def test_measured_shares_are_kept_for_a_resumed_run_on_the_same_devices(speeds, tmp_path, caplog):
    numbers, calls = speeds
    caplog.set_level(logging.INFO, "jaxddp.experiment")

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("shares: ")]
        caplog.clear()
        return found

    run("auto", tmp_path, 1)
    assert lines() == ["shares: 3 / 1, measured 300 / 100 images/s; slices of 12 / 4 images"]
    saved = json.loads((tmp_path / SHARES_FILE).read_text())
    assert saved["shares"] == "3,1" and saved["devices"] == ["cpu", "cpu"] and saved["processes"] == 1
    assert saved["run_id"] == json.loads((tmp_path / "config.json").read_text())["run_id"]
    numbers[:] = [1.0, 1.0, 2.0]
    run("auto", tmp_path, 2)
    assert lines() == ["shares: 3 / 1, as measured at the start of the run; slices of 12 / 4 images"]
    assert len(calls) == 1
    (tmp_path / SHARES_FILE).write_text("{")
    run("auto", tmp_path, 3)
    again = f"shares: measured again, because {tmp_path / SHARES_FILE} has none of this run on these devices"
    assert lines()[0] == again
    numbers[:] = [1.0, 1.0, 1.0, 5.0]
    run("auto", tmp_path, 4, devices=4)
    assert lines() == [again, "shares: 1 / 1 / 1 / 5, measured 1 / 1 / 1 / 5 images/s; slices of 2 / 2 / 2 / 10 images"]
    assert len(calls) == 3


@pytest.mark.slow
def test_the_speed_of_each_device_is_measured(monkeypatch):
    monkeypatch.setattr(measured_shares, "_LEAST_SECONDS", 0.0)
    setup = make_setup("auto", 3)
    assert setup.way.counts == (6, 5, 5)
    speeds = measured_shares.measure_shares(setup)
    assert len(speeds) == 3 and all(0 < speed < np.inf for speed in speeds)
    settled = settle_shares(setup)
    assert sum(rows.stop - rows.start for _, rows in settled.slices) == BATCH
    assert settled.config.parallel.shares not in (None, "auto")
    # The measurement leaves the state as it is.
    assert int(setup.state.step) == 0 and not jax.tree.leaves(setup.state)[0].is_deleted()
