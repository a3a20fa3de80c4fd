"""Microbatches: their gradient equals that of the whole batch, with one all-reduce and less memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import essential_and_rare, rare_case
from support.data import NO_AUGMENTATION, random_batch, random_table
from support.networks import SmallNet, drawing_model, largest_difference, objective_of, randomized, train_steps
from support.runs import changed, setup_of, train
from support.shared import sgd, topology_of

from jaxddp.api import prepare_training
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.engine.gradients import Averaging, Gradients, scan_parts
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way

SMALL, LARGE = random_table(32), random_table(64, image=16)
PLAIN, BATCH_NORMALIZED = SmallNet(dtype=jnp.float64), SmallNet(batch_norm=True, dtype=jnp.float64)


@functools.cache
def trained(net, devices: int, gradients: Gradients, masked: int = 0, size: int = 24, steps: int = 3):
    """Return parameters, statistics and losses after a few steps of plain SGD in float64."""
    with jax.enable_x64(True):
        batches = [random_batch(size, masked=masked, seed=number) for number in range(steps)]
        params, sums, after = train_steps(objective_of(net), Way(topology_of(devices), gradients), batches)
        assert min(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), params[0], after.params))) > 1e-6
        return after.params, after.model_state, [each.means() | {"count": each.count()} for each in sums]


LAYOUTS = [(*layout, unrolled) for layout in ((1, 2, 1), (1, 8, 1), (2, 4, 1), (3, 2, 3)) for unrolled in (False, True)]
ESSENTIAL = {(2, 4, 1, False), (3, 2, 3, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "accumulate", "buckets", "unrolled"),
    [layout if layout in ESSENTIAL else rare_case(*layout) for layout in LAYOUTS],
)
def test_microbatches_equal_the_whole_batch(devices, accumulate, buckets, unrolled):
    """The batch has no padding, or padding that is spread unevenly over the microbatches."""
    gradients = Gradients(Averaging(buckets), accumulate, for_cpu=unrolled)
    for masked in (0, 7):
        result, expected = trained(PLAIN, devices, gradients, masked), trained(PLAIN, 1, Gradients(), masked)
        assert largest_difference(result, expected) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", essential_and_rare((False,), True))
def test_a_microbatch_is_normalized_like_the_slice_of_a_device(unrolled):
    """Batch norm normalizes each microbatch separately, and averages the running statistics, as over devices."""
    result = trained(BATCH_NORMALIZED, 1, Gradients(accumulate=4, for_cpu=unrolled))
    assert largest_difference(result, trained(BATCH_NORMALIZED, 4, Gradients())) < 1e-9
    assert largest_difference(result, trained(BATCH_NORMALIZED, 2, Gradients(accumulate=2, for_cpu=unrolled))) < 1e-9
    assert largest_difference(result, trained(BATCH_NORMALIZED, 1, Gradients())) > 1e-4


def lowered(setup, gradients: Gradients):
    """Return the lowered training step of a setup that computes gradients as `gradients` specifies."""
    step: Any = Way(setup.topology, gradients).step(Phases(setup.supervised, setup.optimizer))
    return step.lower(setup.state, next(setup.batches(0, 1)))


@pytest.mark.parametrize("unrolled", [False, True])
def test_accumulation_uses_one_all_reduce(unrolled):
    """Collectives are counted in the lowered program, before XLA merges all-reduces."""
    setup = setup_of(SmallNet(batch_norm=True), sgd(0.1), devices=2, batch_size=12, data=NO_AUGMENTATION)
    assert lowered(setup, Gradients(accumulate=3, for_cpu=unrolled)).as_text().count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("unrolled", [False, True])
def test_the_parts_of_a_step_run_in_order_even_if_a_sum_is_infinite(unrolled):
    batch = random_batch(12)

    @jax.jit
    def scan(batch):
        def add_part(total, part, number):
            total = total + jnp.where(number == 1, jnp.inf, 1.0)
            return total, (part.row, number, total)

        return scan_parts(add_part, jnp.float32(0), batch, 4, unrolled=unrolled)

    total, (rows, numbers, totals) = scan(batch)
    assert rows.reshape(-1).tolist() == batch.row.tolist()
    assert numbers.tolist() == [0, 1, 2, 3] and float(total) == np.inf
    assert totals.tolist() == [1, np.inf, np.inf, np.inf]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, rare_case(2)])
def test_sync_batch_norm_of_microbatches_does_not_depend_on_the_number_of_devices(devices):
    with jax.enable_x64(True):
        runs = []
        for count in (1, devices):
            net = SmallNet(batch_norm=True, sync="data", dtype=jnp.float64)
            setup = setup_of(net, sgd(0.1), random_table(50), devices=count, batch_size=16)
            state = setup.state.replace(params=randomized(setup.state.params))
            setup = dataclasses.replace(setup, state=setup.topology.replicate(state))
            state = train(setup, {"train": {"accumulate": 2, "duration": "4 steps"}})
            runs.append(jax.device_get((state.params, state.model_state)))
    assert largest_difference(*runs) < 1e-9


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (1, {"train": {"accumulate": 4}}),
        (2, {}),
        # A shard's key depends on its number in the global batch.
        (4, {"parallel": {"reproducible": True}}),
        (8, {"parallel": {"reproducible": True}}),
        rare_case(1, {"parallel": {"reproducible": True}}),
    ],
)
def test_no_two_parts_of_a_batch_draw_the_same_numbers(devices, changes):
    """If two parts drew the same numbers, the mean of the squares of the draws would be the square of their mean."""
    setup = setup_of(drawing_model(), sgd(1.0), SMALL, devices=devices, batch_size=16, data=NO_AUGMENTATION)
    setup = changed(setup, changes)
    step, batch = setup.step(), next(setup.batches(0, 1))
    state, _ = step(setup.state, batch)
    first = jax.device_get(state.model_state)
    assert first["squared"] - np.square(first["drawn"]) > 1e-3
    # Two steps draw different numbers, too.
    state, _ = step(state, batch)
    assert abs(state.model_state["drawn"] - first["drawn"]) > 1e-3


def test_a_batch_that_microbatches_cannot_share_raises_a_one_line_error():
    table, model = random_table(64), SmallNet()
    mixed = DataConfig(augment=AugmentConfig(mixup=0.2))
    for size, words, message in (
        (8, {"accumulate": 3}, "^a global batch of 16 cannot be divided among 2 devices with accumulate=3 .*; 12 or"),
        (6, {"accumulate": 2, "data": mixed}, "a global batch of 12 makes 4 parts of 3, an odd number"),
        (8, {"accumulate": 0}, "^accumulate=0: expected 1 to 65,536$"),
    ):
        with pytest.raises(InputError, match=message):
            prepare_training(model, table, 2, sgd(0.1), size, **words)
