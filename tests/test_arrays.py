"""Sets in memory: the same columns and shards as files, without TensorFlow; what is wrong with them gets one line."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from jaxddp.data.arrays import ArrayTable, array_batches, array_eval_batches
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.errors import InputError

NAMES = ("ant", "bee", "cat")


def make_table(num_examples: int = 11) -> ArrayTable:
    """Row r is an image of r + 1 everywhere, so that an image tells its row, and padding (0) is none of them."""
    images = np.broadcast_to(
        np.arange(1, num_examples + 1, dtype=np.uint8)[:, None, None, None], (num_examples, 4, 5, 3)
    )
    return ArrayTable(images, np.arange(num_examples) % 3, NAMES)


def test_batches_hold_the_rows_of_the_order():
    table, order = make_table(), SampleOrder(11, 6, seed=3)
    batches = list(array_batches(table, order, start=1, stop=5))
    assert len(batches) == 4
    for step, batch in enumerate(batches, start=1):
        assert [leaf.dtype for leaf in batch[:5]] == [np.uint8, np.int32, np.float32, np.int32, np.int32]
        np.testing.assert_array_equal(batch.row, order.rows(step))
        np.testing.assert_array_equal(batch.epoch, order.epochs(step))
        np.testing.assert_array_equal(batch.label, order.rows(step) % 3)
        np.testing.assert_array_equal(batch.image, table.images[order.rows(step)])
        assert batch.mask.tolist() == [1] * 6


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_put_together_are_the_batch(count: int):
    table, order = make_table(), SampleOrder(11, 6, seed=3)
    whole = list(array_batches(table, order, start=0, stop=4))
    parts = [list(array_batches(table, order, start=0, stop=4, index=i, count=count)) for i in range(count)]
    for step, batch in enumerate(whole):
        for leaf, pieces in zip(batch[:5], zip(*(part[step][:5] for part in parts), strict=True), strict=True):
            np.testing.assert_array_equal(np.concatenate(pieces), leaf)


@pytest.mark.parametrize(("batch_size", "count"), [(4, 1), (4, 2), (4, 4), (16, 4), (11, 1)])
def test_evaluation_counts_every_example_once(batch_size: int, count: int):
    table, order = make_table(), EvalOrder(11, batch_size)
    shards = [list(array_eval_batches(table, order, index=i, count=count)) for i in range(count)]
    assert {len(batches) for batches in shards} == {order.num_batches}
    batches = [batch for shard in shards for batch in shard]
    real = np.concatenate([batch.row[batch.mask == 1] for batch in batches])
    assert sorted(real) == list(range(11))
    for batch in batches:
        np.testing.assert_array_equal(batch.image[:, 0, 0, 0], np.where(batch.mask == 1, batch.row + 1, 0))
        assert not batch.label[batch.mask == 0].any()
        assert not batch.row[batch.mask == 0].any()


def test_select_makes_labels_dense_and_take_keeps_the_balance():
    table = make_table()
    chosen = table.select("ant,cat")
    assert chosen.class_names == ("ant", "cat")
    assert (chosen.images[:, 0, 0, 0] - 1).tolist() == [0, 2, 3, 5, 6, 8, 9]
    assert chosen.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert table.select("1:3").class_names == ("bee", "cat")
    assert table.select(None) is table
    taken = table.take(6)
    assert np.bincount(taken.labels).tolist() == [2, 2, 2]
    assert ((taken.images[:, 0, 0, 0] - 1) % 3 == taken.labels).all()
    assert table.take(99).num_examples == 11
    with pytest.raises(InputError, match="limit 0"):
        table.take(0)
    with pytest.raises(InputError, match="unknown class 'dog'"):
        table.select("dog")
    with pytest.raises(InputError, match="no example is of these classes"):
        ArrayTable(table.images[:1], np.array([0]), NAMES).select("cat")


def test_fingerprint_follows_the_content_alone():
    table = make_table()
    images = table.images.copy()
    images[10, 3, 4, 2] += 1
    others = (
        dataclasses.replace(table, images=images),
        dataclasses.replace(table, labels=np.roll(table.labels, 1)),
        dataclasses.replace(table, class_names=("ant", "bee", "cow")),
        dataclasses.replace(table, images=table.images.reshape(11, 5, 4, 3)),
    )
    assert len({table.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert make_table().fingerprint == table.fingerprint
    assert dataclasses.replace(table, labels=table.labels.astype(np.int64)).fingerprint == table.fingerprint


def test_shapes_and_counts():
    table = make_table()
    assert (table.num_examples, len(table), table.num_classes, table.image_shape) == (11, 11, 3, (4, 5, 3))
    assert table.labels.dtype == np.int32


IMAGES, LABELS = np.zeros((4, 2, 2, 1), np.uint8), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES[..., 0], LABELS, r"images of shape \(4, 2, 2\): give \[N, H, W, C\]"),
        (IMAGES.astype(np.float32), LABELS, "images of float32: give uint8 from 0 to 255"),
        (IMAGES[:0], LABELS[:0], r"images of shape \(0, 2, 2, 1\): a data set needs at least one example"),
        (IMAGES, LABELS[:3], r"labels of shape \(3,\) for 4 images: give one label per image"),
        (IMAGES, LABELS[:, None], r"labels of shape \(4, 1\) for 4 images"),
        (IMAGES, LABELS.astype(np.float64), "labels of float64: give integers"),
        (IMAGES, np.array([0, 0, 3, 0]), r"label 3 of row 2: 3 class names allow 0\.\.2"),
        (IMAGES, np.array([0, -1, 0, 0]), r"label -1 of row 1: 3 class names allow 0\.\.2"),
    ],
)
def test_bad_arrays_get_one_line(images: np.ndarray, labels: np.ndarray, message: str):
    with pytest.raises(InputError, match=message):
        ArrayTable(images, labels, NAMES)


def test_an_order_that_does_not_fit_is_refused_before_the_first_batch():
    table = make_table()
    with pytest.raises(InputError, match="an order of 12 examples for 11"):
        array_batches(table, SampleOrder(12, 6, seed=0), start=0, stop=1)
    with pytest.raises(InputError, match="batch size 6 does not divide into 4 equal parts; use 4 or 8"):
        array_eval_batches(table, EvalOrder(11, 6), count=4)


def test_tensorflow_stays_out():
    code = "import sys, jaxddp.data.arrays, jaxddp.data.images.verify; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
