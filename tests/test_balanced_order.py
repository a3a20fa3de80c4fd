"""Balanced sampling: in each stretch, as many examples as the data set has, every class appears equally often."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import random_table
from support.networks import linear_model
from support.runs import setup_of, train
from support.shared import sgd

from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.data.order import BalancedOrder

BALANCED = DataConfig(sampling="balanced", image_size=6, crop="whole", augment=AugmentConfig(flip=True))
CASES = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=60).map(np.array), st.integers(0, 2**63 - 1), st.data()
)


def stream(order, steps):
    return tuple(np.concatenate([column(step) for step in steps]) for column in (order.rows, order.epochs))


@given(CASES)
def test_each_stretch_has_every_class_equally_often_and_repeats_no_example_before_all_of_its_class(case):
    labels, seed, data = case
    size, batch = len(labels), data.draw(st.integers(1, len(labels)))
    order = BalancedOrder.of(labels, batch, seed)
    steps = -(-3 * size // batch)
    rows, epochs = (column[: 3 * size] for column in stream(order, range(steps)))
    classes = np.unique(labels)
    for stretch in rows.reshape(3, size):
        counts = np.array([(labels[stretch] == label).sum() for label in classes])
        assert counts.sum() == size and np.ptp(counts) <= 1
    # Where the counts of a stretch differ by one, other classes get the extra example in the next stretch.
    assert np.ptp([(labels[rows] == label).sum() for label in classes]) <= 1
    for label in classes:
        is_of_class = labels[rows] == label
        appeared, members = rows[is_of_class], np.flatnonzero(labels == label)
        for start in range(0, len(appeared), len(members)):
            assert len(set(appeared[start : start + len(members)].tolist())) == len(appeared[start:][: len(members)])
        # The number of earlier appearances does not depend on the order of the calls.
        assert epochs[is_of_class].tolist() == [(appeared[:i] == row).sum() for i, row in enumerate(appeared)]
    step = data.draw(st.integers(0, steps - 1))
    np.testing.assert_array_equal(BalancedOrder.of(labels.copy(), batch, seed).rows(step), order.rows(step))


def test_the_balanced_order_equals_that_of_earlier_releases():
    labels = np.array([0] * 40 + [1] * 7 + [3] * 3)
    columns = np.concatenate(stream(BalancedOrder.of(labels, 10, 17), range(20)))
    digest = hashlib.sha256(columns.astype("<i8").tobytes()).hexdigest()
    assert digest == "8306f1d8337cec665f24894eca3093ad4c032d369d45c7941ac5446b245e66fd"
    assert (BalancedOrder.of(labels, 10, 18).rows(0) != columns[:10]).any()


def losses_and_weight(setup, steps=5):
    values: list[float] = []
    listener = type("Losses", (), {"step": lambda self, record: values.append(record.metrics["loss"])})()
    state = train(setup, {"train": {"duration": f"{steps} steps"}, "log": {"every": "1 step"}}, listeners=[listener])
    return values, np.asarray(state.params["weight"])


@pytest.mark.slow
def test_a_run_draws_the_same_balanced_batches_on_any_devices_and_from_a_device_cache():
    table, results = random_table(50), {}
    table = table.rows(np.flatnonzero((table.labels > 0) | (np.arange(50) % 4 == 0)))
    for devices, cache in [(1, "none"), (4, "device")]:
        data = dataclasses.replace(BALANCED, cache=cache)
        setup = setup_of(linear_model(), sgd(0.1), table, devices=devices, data=data)
        assert isinstance(setup.feed.order, BalancedOrder) and isinstance(setup.with_seed(3).feed.order, BalancedOrder)
        results[devices, cache] = losses_and_weight(setup)
    for values, weight in results.values():
        np.testing.assert_allclose(values, results[1, "none"][0], rtol=1e-5)
        np.testing.assert_allclose(weight, results[1, "none"][1], rtol=1e-4, atol=1e-6)
