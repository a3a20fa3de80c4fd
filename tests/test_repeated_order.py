"""Repeated augmentation: a batch has m copies of each of its examples, and m epochs have m copies of every example."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import random_table
from support.networks import linear_model
from support.runs import setup_of
from support.shared import sgd, topology_of

import jaxddp
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.order import BalancedOrder, RepeatedOrder, SampleOrder, Shard
from jaxddp.setup.recipe import make_order
from jaxddp.setup.resources import check_placement

REPEATED = DataConfig(repeats=2, augment=AugmentConfig(policy="trivial_augment"))
SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(0, 60))
"""(m, B / m, N - B)."""


def order_of(sizes: tuple[int, int, int], seed: int) -> RepeatedOrder:
    repeats, distinct, more = sizes
    return RepeatedOrder.of(SampleOrder(repeats * distinct + more, distinct, seed), repeats)


@given(sizes=SIZES, seed=SEEDS, step=st.integers(0, 10**6))
def test_a_batch_has_each_of_its_examples_several_times_with_other_random_numbers(sizes, seed, step):
    order = order_of(sizes, seed)
    repeats, distinct, _ = sizes
    rows, epochs = order.rows(step), order.epochs(step)
    assert len(rows) == len(epochs) == order.batch_size == order.num_slots == repeats * distinct
    # The batch consists of equal parts, so copies are B / m positions apart.
    parts = rows.reshape(repeats, distinct)
    assert (parts == order.base.rows(step)).all()
    # A row may be twice in a part that spans two passes, and differs by its number of earlier appearances.
    assert len({*zip(rows.tolist(), epochs.tolist(), strict=True)}) == order.batch_size
    for count in (count for count in (2, 3) if order.batch_size % count == 0):
        halves = [Shard(index, count).of(rows) for index in range(count)]
        np.testing.assert_array_equal(np.concatenate(halves), rows)


@given(sizes=SIZES, seed=SEEDS)
def test_m_epochs_have_each_example_m_times(sizes, seed):
    order = order_of(sizes, seed)
    repeats, distinct, _ = sizes
    number = order.num_examples
    # Whole passes end with a batch after `distinct` of them.
    steps = range(number)
    rows = np.concatenate([order.rows(step) for step in steps])
    epochs = np.concatenate([order.epochs(step) for step in steps])
    assert (np.bincount(rows, minlength=number) == repeats * distinct).all()
    # Every appearance of an example has its own number, without gaps.
    by_row = np.lexsort((epochs, rows))
    assert (epochs[by_row].reshape(number, -1) == np.arange(repeats * distinct)).all()
    # A pass over the examples takes m epochs.
    steps = range(-(-repeats * number // order.batch_size))
    first_pass = np.concatenate([order.base.rows(step) for step in steps])[:number]
    assert (np.sort(first_pass) == np.arange(number)).all()


def test_an_epoch_keeps_its_length():
    order, plain = order_of((3, 4, 8), 5), SampleOrder(20, 12, 5)
    assert (order.num_examples, order.batch_size) == (plain.num_examples, plain.batch_size)
    assert order.is_of_first_epoch(1).tolist() == plain.is_of_first_epoch(1).tolist()
    table, topology = random_table(20), topology_of(1)
    config = Config().replace(train={"batch_size": 12}, seed=5)
    assert make_order(table, config, topology) == plain
    assert make_order(table, config.replace(data={"repeats": 3}), topology) == order_of((3, 4, 8), 5)


def test_copies_of_balanced_classes_are_balanced():
    labels = np.repeat([0, 1, 2], [30, 6, 4])
    table = random_table(40)
    table = jaxddp.ArrayTable(table.images, labels, ("a", "b", "c"))
    config = Config().replace(train={"batch_size": 12}, data={"repeats": 2, "sampling": "balanced"})
    order = make_order(table, config, topology_of(1))
    assert isinstance(order, RepeatedOrder) and isinstance(order.base, BalancedOrder) and order.base.batch_size == 6
    rows = np.concatenate([order.rows(step) for step in range(20)])
    assert np.bincount(labels[rows]).tolist() == [80, 80, 80]
    pairs = {*zip(rows.tolist(), np.concatenate([order.epochs(step) for step in range(20)]).tolist(), strict=True)}
    assert len(pairs) == 240


@pytest.mark.slow
def test_copies_of_an_example_are_augmented_differently():
    table = random_table(16, image=12)
    setup = setup_of(linear_model(), sgd(0.1), table, data=dataclasses.replace(REPEATED, repeats=4), batch_size=16)
    batch = next(setup.feed.batches(0, 1))
    preprocess = Preprocess(augment=REPEATED.augment)
    images = np.asarray(jax.jit(lambda batch: preprocess(batch, train=True))(batch).images).reshape(4, 4, -1)
    assert (np.asarray(batch.image).reshape(4, 4, -1) == np.asarray(batch.image).reshape(4, 4, -1)[:1]).all()
    assert sum(len(np.unique(images[:, row], axis=0)) for row in range(4)) >= 14


@pytest.mark.parametrize(
    ("repeats", "batch_size", "message"),
    [
        (3, 16, "data.repeats=3 does not divide train.batch_size=16; a batch of 15 or 18 would do"),
        (20, 16, "data.repeats=20 does not divide train.batch_size=16; a batch of 20 would do"),
        (2, 60, "train.batch_size=60 is larger than the data set of 50 examples; use at most 50"),
        (0, 16, "data.repeats=0: expected 1 to 100"),
    ],
)
def test_an_unsuitable_number_of_copies_is_refused(repeats, batch_size, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        setup_of(linear_model(), sgd(0.1), random_table(50), data=DataConfig(repeats=repeats), batch_size=batch_size)


def test_copies_of_the_data_of_each_process_are_refused():
    config = Config().replace(data={"repeats": 2, "placement": "local"})
    message = (
        "data.repeats=2 with data.placement=local: the copies of an example would be on one process; set data.repeats "
        "to 1"
    )
    with pytest.raises(InputError, match=message):
        check_placement(config)


def test_another_seed_gives_another_order():
    order = order_of((2, 4, 8), 5)
    assert dataclasses.replace(order, seed=6) == order_of((2, 4, 8), 6) != order
