"""Promise 2: every example appears once an epoch, in batches that depend only on (N, B, seed, step)."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.data.order import EvalOrder, SampleOrder, Shard, permutation

SHARDS = (1, 2, 3, 5)
SIZES = st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
SEEDS = st.integers(0, 2**63 - 1)


def rows_of_steps(order: SampleOrder, stop: int, start: int = 0) -> np.ndarray:
    return np.concatenate([order.rows(step) for step in range(start, stop)])


def test_the_permutation_equals_that_of_earlier_releases():
    digest = hashlib.sha256(permutation(10_007, 17, 3).astype("<i8").tobytes()).hexdigest()
    assert digest == "7e7715008760c763ea43ec3abdaa42b5217b2051ffb24f374b68deeb40b2bfbc"
    assert SampleOrder(10, 4, seed=0).rows(0).tolist() == [0, 2, 9, 1]
    assert SampleOrder(10, 4, seed=2**63 - 1).rows(2).tolist() == [0, 5, 0, 6]


@given(sizes=SIZES, seed=SEEDS, epochs=st.integers(1, 3))
def test_each_example_appears_once_an_epoch(sizes: tuple[int, int], seed: int, epochs: int):
    num_examples, batch_size = sizes
    order = SampleOrder(num_examples, batch_size, seed)
    stop = Duration.parse(f"{epochs} epochs").steps(num_examples=num_examples, batch_size=batch_size)
    rows = rows_of_steps(order, stop)[: epochs * num_examples].reshape(epochs, num_examples)
    assert (np.sort(rows, axis=1) == np.arange(num_examples)).all()
    seen = np.concatenate([order.epochs(step) for step in range(stop)])[: epochs * num_examples]
    assert (seen.reshape(epochs, num_examples) == np.arange(epochs)[:, None]).all()


@given(size=st.integers(1, 7), extra=st.integers(0, 50), seed=SEEDS, step=st.integers(0, 10**6))
def test_shards_of_any_count_make_the_same_batch(size: int, extra: int, seed: int, step: int):
    batch_size = size * 30
    for order in (SampleOrder(batch_size + extra, batch_size, seed), EvalOrder(batch_size + extra, batch_size)):
        for count in SHARDS:
            shards = [Shard(index, count).of(order.rows(step)) for index in range(count)]
            assert {len(rows) for rows in shards} == {batch_size // count}
            np.testing.assert_array_equal(np.concatenate(shards), order.rows(step))


@pytest.mark.parametrize(("shares", "hosts"), [(2, 1), (4, 2), (4, 4)])
def test_a_microbatch_of_all_slices_together_is_a_part_of_the_batch(shares: int, hosts: int):
    rows = SampleOrder(50, 24, seed=1).rows(0)
    parts = [Shard(host, hosts, shares=shares, microbatches=3).of(rows) for host in range(hosts)]
    slices = np.concatenate(parts).reshape(shares, 3, -1)
    np.testing.assert_array_equal(slices.swapaxes(0, 1).reshape(-1), rows)


def test_orders_differ_between_epochs_and_seeds_and_not_between_batch_sizes():
    epochs = rows_of_steps(SampleOrder(100, 100, seed=5), 3).reshape(3, 100)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert (rows_of_steps(SampleOrder(100, 50, seed=5), 6) == epochs.ravel()).all()
    assert (SampleOrder(100, 100, seed=6).rows(0) != epochs[0]).any()


@given(num_examples=st.integers(1, 300), batch_size=st.integers(1, 400))
def test_evaluation_has_every_row_once_and_pads_with_minus_one(num_examples: int, batch_size: int):
    order = EvalOrder(num_examples, batch_size)
    rows = np.concatenate([order.rows(step) for step in range(order.num_batches)])
    assert rows[:num_examples].tolist() == list(range(num_examples))
    assert (rows[num_examples:] == -1).all()
    assert 0 <= len(rows) - num_examples < batch_size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampleOrder(10, 11, 0), "train.batch_size=11 is larger than the data set of 10 examples; use at"),
        (lambda: SampleOrder(10, 0, 0), "batch_size=0: expected 1 to 2,147,483,647"),
        (lambda: EvalOrder(0, 4), "num_examples=0: expected 1 to 2,147,483,647"),
        (lambda: SampleOrder(10, 2, -1), "seed=-1: expected 0 to 9,223,372,036,854,775,807"),
        (lambda: SampleOrder(10, 2, 0).rows(-1), "step -1: the first step is 0"),
        (lambda: Shard(0, 4).of(np.arange(5)), "batch size 5 does not divide into 4 equal parts; use 4 or 8"),
        (lambda: Shard(0, 4).of(np.arange(3)), "batch size 3 does not divide into 4 equal parts; use 4$"),
        (lambda: Shard(2, 2).of(np.arange(4)), "part 2 of a batch of 2 parts: use 0..1"),
    ],
)
def test_invalid_sizes_seeds_and_steps_raise_a_one_line_error(make, message: str):
    with pytest.raises(InputError, match=message):
        make()
