"""Substitutes for bad images: equal on any number of hosts, counted, and never a file that was cut short."""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from support.images import encode
from support.streams import DATA, SIZE, table_of, waves

from jaxddp.core.errors import InputError
from jaxddp.data.batch import Batch
from jaxddp.data.order import WHOLE, SampleOrder, Shard
from jaxddp.data.source import Labels, Substitutes, labels_of
from jaxddp.data.stream.decode import Pixels, example_keys
from jaxddp.data.table import ExampleTable

NUM_EXAMPLES, CLASSES, BATCH = 18, 3, 6
SEED = 1


def cut(data: bytes) -> bytes:
    """Return two thirds of a file, closed with an end marker."""
    return data[: 2 * len(data) // 3] + b"\xff\xd9"


def write(root: Path, bad: Mapping[int, bytes | None]) -> list[str]:
    names = [f"{row:02d}.JPEG" for row in range(NUM_EXAMPLES)]
    for row, name in enumerate(names):
        content = bad.get(row, encode(waves(row, 40, 48)))
        if content is not None:
            (root / name).write_bytes(content)
    return names


def substitute(row: int, bad: Mapping[int, bytes | None]) -> int:
    """Return the next row of the class whose image is sound, cyclically."""
    rows = [*range(row % CLASSES, NUM_EXAMPLES, CLASSES)]
    at = rows.index(row)
    return next(other for other in rows[at:] + rows[:at] if other not in bad)


# A chain of three up to the last row of the class, two single rows, and a progressive file.
BAD: dict[int, bytes | None] = {
    9: None,
    12: cut(encode(waves(12, 40, 48))),
    15: b"",
    1: b"no image",
    10: encode(waves(10))[:-30],
    11: cut(encode(waves(11, 40, 48), progressive=True)),
}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("spoiled")
    return root, write(root, BAD)


def batches(table: ExampleTable, steps: range = range(6), shard: Shard = WHOLE) -> list[Batch]:
    order = SampleOrder(NUM_EXAMPLES, BATCH, SEED)
    return list(table.train_batches(order, DATA, steps, shard, Substitutes(labels_of(table), table.name)))


@pytest.fixture(scope="module")
def read(spoiled) -> tuple[list[Batch], list[str]]:
    """Read two epochs on one host; return the batches and the log messages."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("jaxddp.data")
    log.addHandler(handler)
    try:
        return batches(table_of(*spoiled)), messages
    finally:
        log.removeHandler(handler)


@pytest.fixture(scope="module")
def one_host(read) -> list[Batch]:
    return read[0]


@pytest.mark.ci
@pytest.mark.parametrize(("count", "steps"), [(2, range(3)), pytest.param(3, range(6), marks=pytest.mark.exhaustive)])
def test_hosts_together_equal_one_host_also_with_bad_files(spoiled, one_host, count: int, steps: range):
    # Each host finds bad files itself, so each has its own table; in one epoch it finds all.
    hosts = [batches(table_of(*spoiled), steps, Shard(index, count)) for index in range(count)]
    for batch, *shards in zip(one_host[: len(steps)], *hosts, strict=True):
        for leaf, *parts in zip(*map(jax.tree.leaves, (batch, *shards)), strict=True):
            np.testing.assert_array_equal(np.concatenate(parts), leaf)


@pytest.mark.slow
def test_the_next_sound_row_of_the_class_is_substituted_and_counted(spoiled, one_host):
    table = table_of(*spoiled)
    order = SampleOrder(NUM_EXAMPLES, BATCH, SEED)
    for step, batch in enumerate(one_host):
        np.testing.assert_array_equal(batch.row, order.rows(step))
        np.testing.assert_array_equal(batch.label, order.rows(step) % CLASSES)
        assert batch.substituted.dtype == np.float32
        assert batch.substituted.tolist() == [row in BAD for row in batch.row.tolist()]
        keys = example_keys(SEED, batch.epoch, batch.row)
        for image, row, key in zip(batch.image, batch.row.tolist(), keys, strict=True):
            expected = Pixels(SIZE, area=DATA.crop_area)(table.read(substitute(row, BAD)), key)
            np.testing.assert_array_equal(image, expected)


def test_the_log_names_each_bad_file_once_and_its_substitute(spoiled, read):
    table, (_, lines) = table_of(*spoiled), read
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(table.name(row) for row in BAD)
    assert all("; its substitute is " in line and "\n" not in line for line in lines)
    (line,) = (line for line in lines if line.startswith(table.name(10)))
    assert (
        "cut short: no end-of-image marker" in line
        and "; download it again or leave it out; its substitute is " in line
    )
    assert line.endswith(f"its substitute is {table.name(13)}")


def test_resolve_follows_chains_and_wraps_around(spoiled):
    rows, substitutes = np.arange(NUM_EXAMPLES, dtype=np.int32), Substitutes(labels_of(table_of(*spoiled)))
    assert (substitutes.resolve(rows) == rows).all()
    # A substitute may be read for its own row before or after the row that it replaces.
    for row in (12, 9, 15):
        substitutes.refuse(row, "gone")
    resolved = substitutes.resolve(rows)
    assert resolved.dtype == np.int32 and resolved.tolist() == [0 if row in (9, 12, 15) else row for row in rows]
    for row in (0, 3):
        substitutes.refuse(row, "gone")
    with pytest.raises(InputError, match="^gone; and no image with the label a is left"):
        substitutes.refuse(6, "gone")
    with pytest.raises(InputError, match="^gone; and no image with the label 0.5 is left"):
        Substitutes(Labels(np.array([[0.5], [1]], np.float32), ("age",), ("age",), "numbers")).refuse(0, "gone")


@pytest.fixture(scope="module")
def damaged_below(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A data set with an image whose lower half is missing; all crops are in the upper half."""
    root = tmp_path_factory.mktemp("below")
    names = write(root, {})
    data = encode(waves(4, 400, 40), quality=95)
    (root / names[4]).write_bytes(data[: len(data) // 2] + b"\xff\xd9")
    return root, names


@pytest.mark.slow
def test_an_image_is_rejected_even_where_crops_are_above_the_damage(damaged_below, monkeypatch):
    root, names = damaged_below
    monkeypatch.setattr("jaxddp.data.stream.decode.random_area_window", lambda *args: (0, 0, 24, 24))
    order = SampleOrder(NUM_EXAMPLES, BATCH, 0)
    steps = range(3)
    with pytest.raises(InputError) as caught:
        list(table_of(root, names).train_batches(order, DATA, steps))
    assert str(caught.value).startswith(f"{root / names[4]}: damaged: ")
    assert str(caught.value).endswith("; download it again or leave it out")
    table = table_of(root, names)
    for batch in table.train_batches(order, DATA, steps, substitutes=Substitutes(labels_of(table))):
        assert batch.substituted.tolist() == (batch.row == 4).tolist()
