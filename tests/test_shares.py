"""`parallel.shares`: the division of a batch, the slots of each process, and errors for settings that do not fit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import error_line

from jaxddp.cluster.launcher import sharing_problem
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.shares import Shares, divide
from jaxddp.data.order import SampleOrder, Shard, columns
from jaxddp.engine.ways.choice import choose_way
from jaxddp.mesh import Topology
from jaxddp.setup.measured_shares import shares_of

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@given(WEIGHTS, st.integers(0, 300))
def test_a_total_is_divided_in_proportion_without_a_rest(weights, more):
    total = len(weights) + more
    parts = divide(total, weights)
    assert sum(parts) == total and min(parts) >= 1
    quotas = total * np.array(weights) / sum(weights)
    if quotas.min() >= 1:
        # Each part is the quota rounded up or down.
        assert np.abs(np.array(parts) - quotas).max() < 1 + 1e-9
    in_order = [parts[place] for place in np.lexsort((parts, weights))]
    assert in_order == sorted(parts), "a larger weight has a smaller part"


def test_the_largest_remainders_are_rounded_up_and_every_part_has_at_least_one():
    assert divide(256, [3, 1]) == [192, 64]
    assert divide(10, [1, 1, 1]) == [4, 3, 3]
    assert divide(10, [5.4, 1.9, 2.7]) == [5, 2, 3]
    assert divide(5, [1000, 1, 1]) == [3, 1, 1]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 4), st.integers(0, 20))
def test_sizes_are_multiples_of_a_unit_and_sum_to_the_batch(weights, unit, more):
    shares, devices = Shares(tuple(map(float, weights))), len(weights)
    batch_size = unit * (10 * devices + more)
    sizes = shares.lengths(batch_size, devices, 1, unit)
    assert sum(sizes) == batch_size and min(sizes) >= 1 and all(size % unit == 0 for size in sizes)


def test_a_number_for_each_process_is_divided_among_its_devices():
    assert Shares.parse("3,1").lengths(64, 4, 2) == (24, 24, 8, 8)
    assert Shares.parse("3,1").lengths(64, 2, 2) == (48, 16)
    assert Shares.parse("1,2,3,2").lengths(64, 4, 2) == (8, 16, 24, 16)
    assert Shares.parse("2").lengths(64, 4, 1) == (16, 16, 16, 16)
    assert Shares.parse("auto").lengths(64, 4, 2) == (16, 16, 16, 16)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**31 - 1)
)
def test_processes_have_slots_whose_examples_are_the_rows_of_the_batch_in_order(sizes, devices, ratio, seed):
    """`ratio` is the number of unlabelled examples for each labelled one."""
    processes, sizes = len(sizes), tuple(size for size in sizes for _ in range(devices))
    batch_size = ratio * sum(sizes)
    order = SampleOrder(batch_size + 3, batch_size, seed)
    examples: Any = SimpleNamespace(labels=np.arange(batch_size + 3) + 1)
    for step in (0, 2):
        shards = [Shard(process, processes, sizes) for process in range(processes)]
        batches = [columns(examples, order, step, shard) for shard in shards]
        assert {len(batch.row) for batch in batches} == {devices * ratio * max(sizes)}
        for shard, batch in zip(shards, batches, strict=True):
            assert batch.mask.sum() == shard.examples(batch_size) and len(batch.mask) == shard.slots(batch_size)
            padding = batch.mask == 0
            assert not any(column[padding].any() for column in (batch.row, batch.label, batch.epoch))
        whole = columns(examples, order, step, Shard(sizes=sizes))
        for column, of_processes in zip(whole[1:5], zip(*(batch[1:5] for batch in batches), strict=True), strict=True):
            np.testing.assert_array_equal(column, np.concatenate(of_processes))
        np.testing.assert_array_equal(whole.row[whole.mask > 0], order.rows(step))
        np.testing.assert_array_equal(whole.epoch[whole.mask > 0], order.epochs(step))
        slots = whole.mask.reshape(len(sizes), -1)
        assert slots.sum(1).tolist() == [ratio * size for size in sizes]
        # Each slot begins with its examples.
        assert (np.diff(slots, axis=1) <= 0).all()


def test_a_batch_that_does_not_consist_of_the_slices_is_an_error():
    with pytest.raises(InputError, match=r"batch size 10 does not divide into slices of \(3, 1\); use 8 or 12"):
        Shard(0, 2, (3, 1)).of(np.arange(10))
    with pytest.raises(InputError, match="part 2 of a batch of 2 parts"):
        Shard(2, 2, (3, 1)).of(np.arange(4))


def test_measured_shares_have_three_digits_and_similar_speeds_are_equal():
    assert shares_of([301.44, 99.96], 1, 256) == "3.02,1"
    assert shares_of([109, 100], 2, 256) == "1,1"
    assert shares_of([111, 100], 2, 256) == "1.11,1"
    # The devices of each process have similar speeds.
    assert shares_of([300, 310, 100, 96], 2, 256) == "3.11,1"
    assert shares_of([300, 310, 100, 50], 2, 256) == "6,6.2,2,1"
    assert shares_of([300, 310, 100, 50], 4, 256) == "6,6.2,2,1"


def test_a_device_that_is_too_slow_for_an_example_gets_the_smallest_slice():
    assert Shares.parse(shares_of([10_000, 1], 2, 64, 2)).lengths(64, 2, 1, 2) == (62, 2)


def error_of(devices: int = 2, **sections) -> str:
    return error_line(lambda: choose_way(Config().replace(**sections), Topology.create(devices)))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        *(
            (text, f"parallel.shares='{text}': expected 'auto', or a number for each device or process, as in '3,1'")
            for text in ("3,0", "3,-1", "nan,1", "3:1", "3,")
        ),
        ("1,2,3", "parallel.shares='1,2,3': 3 numbers given for 2 devices of 1 process; give 2"),
        (
            "1000,1",
            "parallel.shares='1000,1': the smallest share is 0.26 of the 256 examples of a batch; give less unequal "
            "numbers, or raise the batch size; a slice has at least 1",
        ),
    ],
)
def test_shares_that_do_not_fit_raise_a_one_line_error(shares, expected):
    assert error_of(parallel={"shares": shares}).startswith(expected)


@pytest.mark.parametrize("shares", ["3,1", "auto"])
@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"model": {"batch_norm": "sync"}},
            "model.batch_norm=sync communicates within a gradient, which each device computes by itself",
        ),
        (
            {"data": {"placement": "local"}},
            "data.placement=local determines the slices by the examples of each process",
        ),
        ({"parallel": {"reproducible": True}}, "parallel.reproducible=True divides each batch into 8 equal shards"),
        ({"parallel": {"buckets": 3}}, "parallel.buckets=3 overlaps communication with a gradient that is complete"),
    ],
)
def test_a_setting_that_needs_equal_slices_raises_a_one_line_error(shares, sections, expected):
    sections = {**sections, "parallel": {"shares": shares, **sections.get("parallel", {})}}
    error = error_of(**sections)
    assert error.startswith(f"parallel.shares={shares!r}: {expected}") and error.endswith("; leave one of them out")


@pytest.mark.parametrize(
    ("sections", "unit", "fitting"),
    [
        ({"train": {"batch_size": 30, "accumulate": 4}}, 4, "28 or 32"),
        ({"train": {"batch_size": 31}, "data": {"augment": {"mixup": 0.2}}}, 2, "30 or 32"),
        ({"train": {"batch_size": 30}, "model": {"batch_norm": "ghost:8"}}, 8, "24 or 32"),
        ({"train": {"batch_size": 6, "accumulate": 6}}, 6, "12"),
    ],
)
def test_a_batch_that_is_no_multiple_of_the_microbatches_raises_a_one_line_error(sections, unit, fitting):
    assert error_of(**sections, parallel={"shares": "3,1"}) == (
        f"train.batch_size={sections['train']['batch_size']} cannot be divided into 2 slices of multiples of {unit} "
        f"with parallel.shares='3,1'; {fitting} would do"
    )


def test_slices_of_equal_size_are_computed_by_the_usual_step():
    topology = Topology.create(2)
    config = Config().replace(train={"batch_size": 16}, parallel={"shares": "1,1"})
    assert choose_way(config, topology) == choose_way(config.replace(parallel={"shares": None}), topology)
    assert choose_way(config.replace(parallel={"shares": "3,1"}), topology).counts == (12, 4)


def test_an_elastic_job_runs_on_the_numbers_of_devices_that_fit_the_shares():
    config = Config().replace(train={"batch_size": 12}, eval={"batch_size": 120}, parallel={"shares": "3,1"})
    assert sharing_problem(config, 2, 1) is None
    assert "2 numbers given for 3 devices of 3 processes" in str(sharing_problem(config, 3, 1))
    measured = config.replace(parallel={"shares": "auto"})
    # Measured slices may have different sizes.
    assert [sharing_problem(measured, processes, 1) for processes in (2, 5)] == [None, None]
    assert sharing_problem(config.replace(parallel={"shares": None}), 5, 1) is not None
