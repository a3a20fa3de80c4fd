"""Promise 2 with data of its own on each process: every example once an epoch, in batches that depend on the step."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxddp.core.errors import InputError
from jaxddp.data.order import EvalOrder, Shard, UnitedOrder, most_in_batch, places_of_host

HOSTS = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(tuple)
SIZES = HOSTS.flatmap(lambda sizes: st.tuples(st.just(sizes), st.integers(1, sum(sizes))))
SEEDS = st.integers(0, 2**63 - 1)


def order_of(sizes: tuple[int, ...], batch_size: int, seed: int = 0, unit: int = 1) -> UnitedOrder:
    most = max(most_in_batch(sizes, host, batch_size) for host in range(len(sizes)))
    return UnitedOrder(sum(sizes), batch_size, seed, sizes, -(-most // unit) * unit)


@given(sizes=SIZES, seed=SEEDS, epochs=st.integers(1, 3), unit=st.integers(1, 3))
def test_each_example_appears_once_an_epoch(sizes, seed, epochs, unit):
    order, seen = order_of(*sizes, seed, unit), Counter()
    for step in range(-(-epochs * order.num_examples // order.batch_size)):
        slots, epoch_of_slots = order.rows(step), order.epochs(step)
        real = slots >= 0
        assert len(slots) == order.num_slots == order.slots * len(sizes[0]) and order.slots % unit == 0
        # Every batch is full, and the epochs follow each other without a gap.
        assert real.sum() == order.batch_size
        ends = np.arange(step * order.batch_size, (step + 1) * order.batch_size) // order.num_examples
        assert sorted(epoch_of_slots[real]) == ends.tolist()
        of_first = [order.of_host(host).is_of_first_epoch(step) for host in range(len(sizes[0]))]
        assert (np.concatenate(of_first) == (epoch_of_slots == ends[0])).all()
        seen.update(zip(epoch_of_slots[real].tolist(), slots[real].tolist(), strict=True))
    wanted = {(epoch, row) for epoch in range(epochs) for row in range(order.num_examples)}
    assert {each for each in seen if each[0] < epochs} == wanted
    assert set(seen.values()) == {1}


@given(sizes=SIZES, seed=SEEDS)
def test_the_slots_of_a_process_hold_its_own_examples_first_and_repeat_them_in_padding(sizes, seed):
    sizes, order = sizes[0], order_of(*sizes, seed)
    bounds = np.cumsum([0, *sizes])
    for step in (0, 1, 7, 10**6):
        slots = order.rows(step)
        for host, (first, end) in enumerate(pairwise(bounds.tolist())):
            own, of_host = Shard(host, len(sizes)).of(slots), order.of_host(host)
            count, rows = int(of_host.mask(step).sum()), of_host.rows(step)
            assert of_host.first_row == first
            assert of_host.mask(step).tolist() == [1] * count + [0] * (order.slots - count)
            assert ((own[:count] >= first) & (own[:count] < end)).all() and (own[count:] == -1).all()
            assert (rows[:count] + first == own[:count]).all() and ((rows >= 0) & (rows < sizes[host])).all()
            if count:
                assert (rows == np.resize(rows[:count], order.slots)).all()
                assert (of_host.epochs(step) == np.resize(of_host.epochs(step)[:count], order.slots)).all()


@given(sizes=SIZES)
def test_the_processes_alternate_as_evenly_as_their_sizes_allow(sizes):
    """Any part of an epoch has the proportions of the whole up to rounding, and no batch needs more slots."""
    (sizes, batch_size), total = sizes, sum(sizes[0])
    places = [places_of_host(sizes, host) for host in range(len(sizes))]
    assert sorted(np.concatenate(places).tolist()) == list(range(total))
    for host, size in enumerate(sizes):
        before = np.searchsorted(places[host], np.arange(total + 1))
        assert np.abs(before - np.arange(total + 1) * size / total).max() <= 0.5 + 0.5 * len(sizes) * size / total
        order, most = order_of(sizes, batch_size), most_in_batch(sizes, host, batch_size)
        counts = [order.of_host(host).mask(step).sum() for step in range(2 * total)]
        assert max(counts) <= most <= batch_size
        # Over two epochs, the batches begin at each place that they can begin at.
        if np.gcd(batch_size, total) == 1:
            assert max(counts) == most


def test_the_order_equals_that_of_earlier_releases():
    order = order_of((5, 2, 3), 4, seed=17)
    assert [places_of_host(order.lengths, host).tolist() for host in range(3)] == [[0, 3, 4, 6, 9], [2, 7], [1, 5, 8]]
    assert [order.rows(step).tolist() for step in range(3)] == [
        [1, 0, -1, 5, -1, -1, 8, -1, -1],
        [3, 2, -1, 6, -1, -1, 9, -1, -1],
        [4, 4, -1, -1, -1, -1, 7, 7, -1],
    ]


def test_processes_and_seeds_have_different_permutations():
    rows = [
        order_of((30, 30), 60, seed).of_host(host).rows(step) for seed in (0, 1) for host in (0, 1) for step in (0, 1)
    ]
    assert len({tuple(each) for each in rows}) == 8


@given(own=st.integers(1, 50), others=st.lists(st.integers(1, 50), max_size=3), size=st.integers(1, 20))
def test_a_process_evaluates_its_rows_once_and_then_padding(own, others, size):
    order = EvalOrder(own, size, max(-(-n // size) for n in (own, *others)))
    rows = np.concatenate([order.rows(step) for step in range(order.num_batches)])
    assert rows[:own].tolist() == list(range(own)) and (rows[own:] == -1).all()


def test_a_batch_is_not_larger_than_all_data():
    message = "train.batch_size=11 is larger than the data set of 10 examples; use at most 10"
    with pytest.raises(InputError, match=message):
        UnitedOrder(10, 11, 0, (6, 4), 7)
