"""Data sets in memory have the columns and shards of files. Invalid arrays raise a one-line error."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.order import EvalOrder, SampleOrder, Shard
from jaxddp.data.source import check_labelled

NAMES = ("ant", "bee", "cat")
DATA = DataConfig()


def make_table(num_examples: int = 11) -> ArrayTable:
    """Return a table whose pixels in row r are all r + 1: an image identifies its row and differs from padding (0)."""
    numbers = np.arange(1, num_examples + 1, dtype=np.uint8)[:, None, None, None]
    return ArrayTable(np.broadcast_to(numbers, (num_examples, 4, 5, 3)), np.arange(num_examples) % 3, NAMES)


def test_batches_hold_the_rows_in_the_given_order():
    table, order = make_table(), SampleOrder(11, 6, seed=3)
    batches = list(table.train_batches(order, DATA, range(1, 5)))
    assert len(batches) == 4
    for step, batch in enumerate(batches, start=1):
        assert [leaf.dtype for leaf in batch[:5]] == [np.uint8, np.int32, np.float32, np.int32, np.int32]
        np.testing.assert_array_equal(batch.row, order.rows(step))
        np.testing.assert_array_equal(batch.epoch, order.epochs(step))
        np.testing.assert_array_equal(batch.label, order.rows(step) % 3)
        np.testing.assert_array_equal(batch.image, table.images[order.rows(step)])
        assert batch.mask.tolist() == [1] * 6


@pytest.mark.parametrize(("batch_size", "count"), [(4, 2), (16, 4)])
def test_evaluation_counts_every_example_once(batch_size: int, count: int):
    table, order = make_table(), EvalOrder(11, batch_size)
    shards = [list(table.eval_batches(order, DATA, Shard(i, count))) for i in range(count)]
    assert {len(batches) for batches in shards} == {order.num_batches}
    batches = [batch for shard in shards for batch in shard]
    assert sorted(np.concatenate([batch.row[batch.mask == 1] for batch in batches])) == list(range(11))
    for batch in batches:
        np.testing.assert_array_equal(batch.image[:, 0, 0, 0], np.where(batch.mask == 1, batch.row + 1, 0))
        assert not batch.label[batch.mask == 0].any() and not batch.row[batch.mask == 0].any()


def test_select_makes_labels_dense_and_take_keeps_the_balance():
    table = make_table()
    selected = table.select("ant,cat")
    assert selected.class_names == ("ant", "cat")
    assert (selected.images[:, 0, 0, 0] - 1).tolist() == [0, 2, 3, 5, 6, 8, 9]
    assert selected.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert table.select("1:3").class_names == ("bee", "cat")
    assert table.select(None) is table
    limited = table.take(6)
    assert np.bincount(limited.labels).tolist() == [2, 2, 2]
    assert ((limited.images[:, 0, 0, 0] - 1) % 3 == limited.labels).all()
    assert len(table.take(99)) == 11
    with pytest.raises(InputError, match="limit 0"):
        table.take(0)
    with pytest.raises(InputError, match="unknown class 'dog'"):
        table.select("dog")
    with pytest.raises(InputError, match="no example has one of the 1 selected classes"):
        ArrayTable(table.images[:1], np.array([0]), NAMES).select("cat")


def test_the_fingerprint_depends_on_the_content_alone():
    table = make_table()
    images = table.images.copy()
    images[10, 3, 4, 2] += 1
    changed_tables = (
        dataclasses.replace(table, images=images),
        dataclasses.replace(table, labels=np.roll(table.labels, 1)),
        dataclasses.replace(table, class_names=("ant", "bee", "cow")),
        dataclasses.replace(table, images=table.images.reshape(11, 5, 4, 3)),
    )
    assert len({table.fingerprint, *(changed.fingerprint for changed in changed_tables)}) == 5
    assert make_table().fingerprint == table.fingerprint
    assert dataclasses.replace(table, labels=table.labels.astype(np.int64)).fingerprint == table.fingerprint
    # The fingerprint hashes 1024 images at a time, and includes the last, incomplete chunk.
    images_of_two_chunks = np.zeros((1025, 1, 1, 1), np.uint8)
    first = ArrayTable(images_of_two_chunks.copy(), np.zeros(1025, int), NAMES)
    images_of_two_chunks[1024] = 1
    assert ArrayTable(images_of_two_chunks, np.zeros(1025, int), NAMES).fingerprint != first.fingerprint


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_become_the_pixels_that_they_were_converted_from(dtype, caplog):
    # The table converts fewer than 1030 images at a time.
    pixels = np.random.default_rng(0).integers(0, 256, (1030, 2, 2, 1), np.uint8)
    pixels[-1], labels = 255, np.zeros(1030, np.int64)
    tables = [ArrayTable(floats, labels, NAMES) for floats in (pixels.astype(dtype) / dtype(255), pixels.astype(dtype))]
    assert [table.images.dtype for table in tables] == [np.uint8] * 2
    assert {table.fingerprint for table in tables} == {ArrayTable(pixels, labels, NAMES).fingerprint}
    dark = ArrayTable(pixels.astype(np.float64) / 65_535, labels, NAMES)
    assert dark.images.dtype == np.uint16 and (dark.images == pixels).all()
    assert not caplog.records


def test_other_floats_are_kept_in_16_bits_which_is_logged(caplog):
    floats = np.random.default_rng(0).random((4, 2, 2, 1), np.float32)
    table = ArrayTable(floats, LABELS, NAMES)
    assert table.images.dtype == np.uint16
    assert np.abs(table.images / 65_535 - floats).max() <= 0.5 / 65_535
    (message,) = [record.getMessage() for record in caplog.records]
    fault = "images: float32 that are not multiples of 1/255 are kept as uint16, each number rounded by at most 7.6e-06"
    assert message == fault
    # A table of some of these rows is not converted again.
    assert (table.rows(np.arange(2)).images == table.images[:2]).all() and len(caplog.records) == 1


def test_floats_of_a_given_kind_are_checked_and_kept():
    pixels, labels = np.random.default_rng(0).integers(0, 256, (1030, 2, 2, 1), np.uint8), np.zeros(1030, np.int64)
    for dtype in (np.float16, np.float32):
        unit = ArrayTable(pixels.astype(dtype) / dtype(255), labels, NAMES, pixels="unit")
        assert unit.fingerprint == ArrayTable(pixels, labels, NAMES).fingerprint and unit.pixels is None
        normalized = ArrayTable(pixels.astype(dtype) / dtype(64) - 2, labels, NAMES, pixels="normalized")
        assert normalized.image_dtype(DATA) == np.float32
        for table in (normalized, normalized.rows(np.arange(3)), normalized.select("ant"), normalized.without_labels()):
            assert table.pixels == "normalized" and (table.images == normalized.images[: len(table)]).all()
        with pytest.raises(InputError, match=r"^data\.mean=\(0\.5,\): these images are already normalized"):
            normalized.check(DataConfig(mean=(0.5,), std=(0.5,), image_size=2, crop="whole"))
        normalized.check(DataConfig(image_size=2, crop="whole"))


FLOATS = np.zeros((1030, 2, 2, 1), np.float32)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (1.001, "unit", "^pixels='unit': row 1027 has the value 1.001; give numbers from 0 to 1$"),
        (np.nan, "unit", "^pixels='unit': row 1027 has the value nan; give numbers from 0 to 1$"),
        (np.inf, "normalized", "^pixels='normalized': row 1027 has the value inf; give finite numbers$"),
        (0, "uint", '^pixels=\'uint\': give "unit" for floats from 0 to 1, "normalized", or None'),
    ],
)
def test_floats_of_another_kind_are_one_line_with_the_row(value: float, kind: Any, message: str):
    floats = FLOATS.copy()
    floats[1027, 1, 0, 0] = floats[1029] = value
    with pytest.raises(InputError, match=message):
        ArrayTable(floats, np.zeros(1030, np.int64), NAMES, pixels=kind)
    with pytest.raises(InputError, match="is for floats, and the images are uint8; leave pixels out"):
        ArrayTable(IMAGES, LABELS, NAMES, pixels="normalized")


IMAGES, LABELS = np.zeros((4, 2, 2, 1), np.uint8), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES[..., 0], LABELS, r"images of shape \(4, 2, 2\): give \[N, H, W, C\]"),
        (np.zeros((4, 3, 8, 8)), LABELS, r"\(4, 3, 8, 8\): the channels are first; give \[N, H, W, C\]"),
        (IMAGES.astype(np.int64), LABELS, "images of int64: give uint8 from 0 to 255, uint16 .* or floats from 0 to 1"),
        (IMAGES - 0.5, LABELS, "images of float64 from -0.5 to -0.5: give floats from 0 to 1, or uint8 from 0 to 255"),
        (IMAGES + np.float32("nan"), LABELS, "images of float32 from nan to nan: give floats from 0 to 1"),
        (IMAGES + 1.5, LABELS, "to 1.5, which are not whole numbers up to 65,535: give floats .* images / 1.5"),
        (IMAGES + 7e4, LABELS, "images of float64 from 70000 to 70000, which are not whole numbers up to 65,535"),
        (IMAGES[:0], LABELS[:0], r"images of shape \(0, 2, 2, 1\): .* a data set needs at least one example"),
        (IMAGES, LABELS[:3], r"labels of shape \(3,\) for 4 images: give one label per image"),
        (IMAGES, LABELS.astype(np.float64), "labels of float64: give integers"),
        (IMAGES, np.ma.array(LABELS, mask=[0, 1, 0, 0]), "labels: a masked array with masked values"),
        (IMAGES, np.array([0, 0, 3, 0]), r"label 3 of row 2: 3 class names allow 0\.\.2, and -1 where"),
    ],
)
def test_bad_arrays_raise_a_one_line_error(images: np.ndarray, labels: np.ndarray, message: str):
    with pytest.raises(InputError, match=message):
        ArrayTable(images, labels, NAMES)


def test_examples_without_labels_are_refused_where_labels_are_needed():
    table = make_table()
    check_labelled(table, "training data")
    partly_labelled = dataclasses.replace(table, labels=np.where(np.arange(11) % 4 == 1, -1, table.labels))
    assert partly_labelled.fingerprint != table.fingerprint
    with pytest.raises(InputError, match="^training data: row 1 has no label .3 of 11 images have none.; give data"):
        check_labelled(partly_labelled, "training data")
    batches = list(partly_labelled.eval_batches(EvalOrder(11, 11), DATA))
    assert batches[0].label.tolist() == partly_labelled.labels.tolist() and batches[0].mask.all()
    check_labelled(partly_labelled.select("cat"), "training data")
    assert len(partly_labelled.select("cat")) == 2
    assert ArrayTable(IMAGES, np.full(4, -1), ()).num_classes == 0


def test_an_order_that_does_not_fit_is_refused_before_the_first_batch():
    table = make_table()
    with pytest.raises(InputError, match="an order of 12 examples, but the data set has 11"):
        table.train_batches(SampleOrder(12, 6, seed=0), DATA, range(1))
    with pytest.raises(InputError, match="batch size 6 does not divide into 4 equal parts; use 4 or 8"):
        table.eval_batches(EvalOrder(11, 6), DATA, Shard(0, 4))
