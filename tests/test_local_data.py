"""`data.placement=local`: processes with data of their own train on the union, as one process with all data would."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import numpy as np
import pytest
from support.data import random_table
from support.local_data import DoubleNet, Unpadded, joined
from support.networks import largest_difference, linear_model
from support.peers import as_processes
from support.runs import recipe_of, setup_of, train
from support.shared import sgd

import jaxddp
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.data.opening import open_splits
from jaxddp.data.order import EvalOrder, Shard, UnitedOrder, columns
from jaxddp.data.source import labels_of
from jaxddp.data.united import VALIDATION, class_counts, own_part, unite
from jaxddp.setup.resources import check_placement
from jaxddp.setup.run_training import make_run

LOCAL = DataConfig(placement="local", augment=AugmentConfig(pad=1))
SIZES = (31, 12)
TABLES = [random_table(size, seed=seed) for seed, size in enumerate(SIZES)]
BATCH_SIZE, UNIT, SEED = 8, 2, 5


def united(*tables: Any, data: DataConfig = LOCAL, what: str = "training data") -> list[Any]:
    """Return the source of each process, or its error."""
    return as_processes(len(tables), lambda peers: unite(tables[peers.process_index], data, peers, what))


def message_of(*tables: Any, **more: Any) -> str:
    """Return the error that all processes raise."""
    errors = united(*tables, **more)
    assert all(isinstance(error, InputError) for error in errors)
    assert len({*map(str, errors)}) == 1
    return str(errors[0])


def orders(sources: list[Any], batch_size: int = BATCH_SIZE, unit: int = UNIT) -> list[Any]:
    return as_processes(len(sources), lambda peers: sources[peers.process_index].order(batch_size, SEED, unit, peers))


def together(batches: list[Batch]) -> Batch:
    """Return the global batch of the parts of all processes."""
    return Batch(*(None if parts[0] is None else np.concatenate(parts) for parts in zip(*batches, strict=True)))


def test_the_processes_make_one_source_of_all_examples():
    sources, whole = united(*TABLES), joined(TABLES)
    assert {source.fingerprint for source in sources} == {sources[0].fingerprint}
    assert sources[0].fingerprint.startswith("2 processes: ")
    for host, source in enumerate(sources):
        assert (len(source), source.lengths, source.host) == (sum(SIZES), SIZES, host)
        assert (class_counts(source) == labels_of(whole).counts).all()
        assert (source.class_ids, source.class_names) == (whole.class_ids, whole.class_names)
        assert own_part(source) is TABLES[host]
        # Other labels are not known here.
        assert source.labels.shape == (sum(SIZES),) and {*source.labels.tolist()} == {-1}
        names = [source.name(31 * host + 3), source.name(34 - 31 * host)]
        assert names == ["row 3", f"example 3 of process {1 - host}"]
    assert repr(sources[1]) == f"UnitedSource(43 examples on 2 processes; process 1 has {TABLES[1]!r})"
    # The fingerprint depends on the data and the order of all processes.
    fingerprints = {united(*tables)[0].fingerprint for tables in (TABLES, TABLES[::-1], (*TABLES, random_table(9)))}
    assert len(fingerprints) == 3


def test_a_process_alone_and_shared_data_keep_their_source():
    assert unite(TABLES[0], LOCAL, ALONE, "training data") is TABLES[0]
    assert united(*TABLES, data=DataConfig()) == TABLES
    sources = united(*TABLES)
    assert as_processes(2, lambda peers: unite(sources[peers.process_index], LOCAL, peers, "")) == sources


def test_equal_validation_data_are_shared_and_equal_training_data_are_reported(caplog):
    same = [random_table(9), random_table(9)]
    assert united(*same, what=VALIDATION) == same
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        assert len(united(*same)[0]) == 18
    assert caplog.messages == [
        "data.placement=local: processes 0 and 1 have the same training data, so each of these examples counts twice; "
        "if they read one folder, leave data.placement out"
    ]


def named(labels: list[int], names: tuple[str, ...]) -> ArrayTable:
    return ArrayTable(np.zeros((len(labels), 6, 6, 3), np.uint8), np.array(labels), names)


def test_classes_that_a_process_lacks_are_added_and_labels_are_renumbered():
    tables = named([0, 1, 1], ("ant", "cat")), named([1, 0], ("bee", "cat"))
    sources = united(*tables)
    for source in sources:
        assert source.class_ids == ("ant", "bee", "cat")
        assert class_counts(source).tolist() == [1, 1, 3]
    order = orders(sources, 5, 1)[0]
    parts = [next(source.train_batches(order, LOCAL, range(1), Shard(host, 2))) for host, source in enumerate(sources)]
    batch = together(parts)
    names = {int(row): source.class_names[label] for row, label in zip(batch.row, batch.label, strict=True)}
    assert names == {0: "ant", 1: "cat", 2: "cat", 3: "cat", 4: "bee"}


def test_several_labels_are_renumbered_too():
    images = np.zeros((2, 6, 6, 3), np.uint8)
    tables = [ArrayTable(images, np.array([[1, 1], [0, 1]]), names) for names in (("a", "c"), ("b", "c"))]
    sources = united(*tables)
    assert labels_of(sources[0]).has_rows and class_counts(sources[0]).tolist() == [1, 1, 4]
    batch = next(sources[1].train_batches(orders(sources, 4, 1)[0], LOCAL, range(1), Shard(1, 2)))
    labels = dict(zip(batch.row.tolist(), batch.label.tolist(), strict=True))
    assert labels == {2: [0, 1, 1], 3: [0, 0, 1]}


def test_classes_that_cannot_be_put_into_one_order_are_an_error():
    assert message_of(named([0], ("ant",)), named([0], ("cat", "bee"))) == (
        "training data: the processes have different classes, and those of process 1 are not in the order of "
        "ids; give all processes the same classes in the same order"
    )
    assert "training data of different processes" in message_of(named([0], ("ant",)), named([0], ("ant\u200b",)))
    numbers = (*map(str, range(12)),)
    assert united(named([10], numbers[:11]), named([11], numbers))[0].class_ids == numbers
    # The same classes in the same order are accepted in any order.
    assert united(named([0], ("b", "a")), named([1], ("b", "a")))[0].class_ids == ("b", "a")
    # A class with two names is an error too.
    kind = type("Named", (ArrayTable,), {"class_ids": ("n1",)})
    tables = [kind(np.zeros((1, 6, 6, 3), np.uint8), np.array([0]), (name,)) for name in ("ant", "bee")]
    fault = "training data: class 'n1' is called 'ant' on one process, and 'bee' on process 1; give a class one name"
    assert message_of(*tables) == fault


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (random_table(5, image=7), "image shape"),
        (ArrayTable(np.zeros((1, 6, 6, 3), np.uint8), np.eye(5, dtype=int)[:1], tuple("abcde")), "labels per image"),
    ],
)
def test_images_and_labels_of_different_kinds_are_an_error(other, fact):
    assert message_of(TABLES[0], other).startswith(f"{fact} of the training data differs: process 0 has ")


def test_the_batches_of_the_processes_are_those_of_the_whole_data_in_the_same_order():
    """Rows, labels, epochs and images are those of one table with all examples; padding repeats images."""
    sources, whole = united(*TABLES), joined(TABLES)
    order = orders(sources)[0]
    assert order == UnitedOrder(43, BATCH_SIZE, SEED, SIZES, 6) and orders(sources)[1] == order
    steps = range(3, 14)
    streams = [source.train_batches(order, LOCAL, steps, Shard(host, 2)) for host, source in enumerate(sources)]
    padded = 0
    for step, parts in zip(steps, zip(*streams, strict=True), strict=True):
        batch, expected = together([*parts]), columns(whole, order, step)
        real = expected.mask > 0
        assert (batch.mask == expected.mask).all() and batch.mask.dtype == np.float32 and real.sum() == BATCH_SIZE
        for name in ("row", "label", "epoch"):
            column, wanted = getattr(batch, name), getattr(expected, name)
            assert (column[real] == wanted[real]).all() and column.dtype == wanted.dtype
        assert (batch.image == whole.images[batch.row]).all()
        assert ((batch.row < SIZES[0]) == (np.arange(len(batch.row)) < order.slots)).all()
        padded += (~real).sum()
    assert padded == len(steps) * (order.num_slots - BATCH_SIZE)


def test_every_process_evaluates_its_own_examples_once():
    sources, whole = united(*TABLES, what=VALIDATION), joined(TABLES)
    order = EvalOrder(len(sources[0]), 8)
    streams = [[*source.eval_batches(order, LOCAL, Shard(host, 2))] for host, source in enumerate(sources)]
    assert [len(stream) for stream in streams] == [8, 8]
    rows = []
    for parts in zip(*streams, strict=True):
        batch = together([*parts])
        real = batch.mask > 0
        assert len(batch.mask) == 8 and (batch.image[~real] == 0).all()
        assert (batch.image[real] == whole.images[batch.row[real]]).all()
        assert (batch.label[real] == whole.labels[batch.row[real]]).all()
        rows += batch.row[real].tolist()
    assert sorted(rows) == [*range(43)]


def test_much_padding_is_reported_and_more_than_half_is_an_error(caplog):
    with caplog.at_level(logging.INFO):
        orders(united(*TABLES))
    assert caplog.messages == [
        "data.placement=local: 2 processes, process 0 has 31 of 43 examples; 4 of the 12 slots of a batch are padding "
        "(33.3%)"
    ]
    errors = orders(united(random_table(40), random_table(5, seed=1), random_table(5, seed=2)), 10, 1)
    assert {*map(str, errors)} == {
        "data.placement=local: process 0 has 40 of 50 examples, so 14 of the 24 slots of a batch would be padding; "
        "distribute the examples more evenly over the processes, or raise the batch size"
    }
    assert "use at most 43" in str(orders(united(*TABLES), 44)[0])


def setup_with(order: Any, devices: int = 1, accumulate: int = 1, model: Any = None) -> Any:
    """Return the setup of one process with all data, whose batches have a given order."""
    config = Config().replace(train={"accumulate": accumulate}, parallel={"self_test": "never"})
    model = model or DoubleNet()
    setup = setup_of(model, sgd(0.1), joined(TABLES), devices=devices, config=config, data=LOCAL, seed=SEED)
    return dataclasses.replace(setup, feed=dataclasses.replace(setup.feed, order=order))


@functools.cache
def trained(devices: int, *, padded: bool, accumulate: int = 1) -> Any:
    order = orders(united(*TABLES))[0]
    setup = setup_with(order if padded else Unpadded.of(order), devices, accumulate)
    assert [len(batch.mask) for batch in setup.batches(0, 2)] == [12 if padded else 8] * 2
    every = {"log": {"every": "12 steps"}, "eval": {"every": "0 steps"}}
    return jax.device_get(train(setup, {"train": {"duration": "12 steps"}, **every}).params)


@pytest.mark.parametrize(("devices", "accumulate"), [(4, 1), pytest.param(2, 2, marks=pytest.mark.ci)])
def test_padding_changes_nothing(devices, accumulate):
    with jax.enable_x64(True):
        one = trained(1, padded=False)
        assert largest_difference(trained(devices, padded=True, accumulate=accumulate), one) < 1e-9


def test_examples_without_a_finite_loss_are_named_without_padding():
    order = orders(united(*TABLES))[0]
    setup = setup_with(order, model=linear_model())
    assert str(setup).endswith("rows 0:12")
    state = setup.state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, setup.state.params))
    text = make_run(setup).suspects(state, 3)
    rows = [row for row in order.rows(2).tolist() if row >= 0]
    assert text == f"The loss is not finite for rows {', '.join(map(str, rows))} of the training data"


def test_pictures_of_predictions_are_omitted_or_an_error():
    source = united(*TABLES)[0]
    setup = setup_with(orders(united(*TABLES))[0], model=linear_model())
    resources = dataclasses.replace(setup.resources, train=source, val=joined(TABLES))
    assert setup.changed(resources=resources).predictor(4) is not None
    setup = setup.changed(resources=dataclasses.replace(resources, val=source))
    assert setup.predictor(4) is None
    message = "data.placement=local: pictures of predictions need the same images on all processes; load the run in one"
    with pytest.raises(InputError, match=message):
        jaxddp.show_predictions(setup.state, setup, TABLES[0])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.cache", "device", "each device would hold the images of all processes; set data.cache to none"),
        ("data.sampling", "balanced", "the classes are balanced over all examples, "),
        ("data.limit", 9, "the examples are chosen among those of all processes; leave data.limit out"),
        ("data.unlabelled", "train", "a second source is not divided among the processes; leave"),
    ],
)
def test_settings_that_need_all_data_in_each_process_are_an_error(key, value, message):
    section, _, name = key.partition(".")
    config = Config().replace(**{section: {name: value}})
    check_placement(config)
    with pytest.raises(InputError, match=f"^{key}={value} with data.placement=local: {message}"):
        recipe_of(config.replace(data={"placement": "local"}))


def test_unlabelled_data_from_python_are_an_error():
    arguments = DoubleNet(), TABLES[0], 1, sgd(0.1), 4
    with pytest.raises(InputError, match="unlabelled=a table with data.placement=local: a second source is not"):
        jaxddp.prepare_training(*arguments, data=LOCAL, unlabelled=TABLES[1])


def test_the_number_of_the_process_is_part_of_paths():
    data = DataConfig(path="/data/{process}", train="train-{process}.csv", data_dir=None, placement="local")
    assert data.of_process(3) == dataclasses.replace(data, path="/data/3", train="train-3.csv")
    shared = dataclasses.replace(data, placement="shared")
    assert shared.of_process(3) == shared
    message = (
        "data.path='/data/{process}' names data of each process, and one process reads them here; give the data of one "
        "process, such as /data/0"
    )
    with pytest.raises(InputError, match=message):
        open_splits(data)
