"""Labels for some images only: the choice of labelled examples, and the order of the unlabelled examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.data import random_table, write_arrays

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.opening import few_labels, labelled_and_unlabelled, open_tables
from jaxddp.data.order import SampleOrder, unlabelled_seed
from jaxddp.data.table import ExampleTable
from jaxddp.mesh import Topology
from jaxddp.setup.feed import Feed

NAMES = tuple("abcde")
SEEDS = st.integers(0, 2**63 - 1)
TABLE = random_table(50)


def table_of(labels) -> ArrayTable:
    """Return a table of images whose pixels have the number of their row as value."""
    return ArrayTable(np.arange(len(labels), dtype=np.uint16).reshape(-1, 1, 1, 1), np.array(labels), NAMES)


@given(st.lists(st.integers(-1, 4), min_size=5, max_size=60), SEEDS, st.data())
def test_each_class_keeps_the_given_number_of_labels_and_fewer_labels_are_a_subset(labels, seed, data):
    labels += [*range(5)]
    table, fewest = table_of(labels), int(np.bincount(np.array(labels) + 1, minlength=6)[1:].min())
    count = data.draw(st.integers(1, fewest))
    few, fewer = few_labels(table, count, seed), few_labels(table, data.draw(st.integers(1, count)), seed)
    assert np.bincount(few.labels).tolist() == [count] * 5
    rows = few.images.ravel()
    assert (np.diff(rows.astype(int)) > 0).all() and (table.labels[rows] == few.labels).all()
    assert set(fewer.images.ravel()) <= set(rows)


def test_the_choice_of_a_class_follows_from_the_seed_and_the_class_alone():
    labels = np.repeat(np.arange(5), 20)
    rows = [few_labels(table_of(labels), 4, seed).images.ravel() for seed in range(4)]
    # Examples of other classes, and the set of classes, change nothing.
    other_order = few_labels(table_of(np.concatenate([np.repeat([1, 3], 20), np.repeat([0, 0, 2, 4], 20)])), 4, 2)
    assert (other_order.images.ravel()[:8] == np.concatenate([rows[2][4:8] - 20, rows[2][12:16] - 40])).all()
    assert (few_labels(table_of(labels).select("1:3"), 4, 2).images.ravel() == rows[2][4:12]).all()
    # Each seed and each class draws other rows. Other rows would change the result of every run with few labels.
    assert len({tuple(chosen) for chosen in rows}) == 4
    assert len({tuple(chosen) for chosen in rows[0].reshape(5, 4) % 20}) == 5
    assert rows[0][:8].tolist() == [4, 7, 17, 18, 23, 27, 28, 38]


def test_an_error_names_a_class_with_too_few_examples():
    with pytest.raises(InputError, match="data.labels_per_class=3: there are 2 examples of class 'b'; give at most 2$"):
        few_labels(table_of([0] * 5 + [1] * 2 + [2, 3, 4] * 3), 3)
    with pytest.raises(InputError, match="there are 0 examples of class 'c'; leave it out, by data.classes$"):
        few_labels(table_of([0, 1, 3, 4]), 1)


def test_the_order_of_unlabelled_examples_is_pinned():
    assert [unlabelled_seed(seed) for seed in (0, 1)] == [3113130522930662291, 287581856148813752]


def feed_of(labelled, unlabelled, *, seed: int = 3, devices: int = 2) -> Feed:
    """Return a feed of batches of 4 labelled and 12 unlabelled examples."""
    data, topology = labelled.default_data(), Topology.create(devices)
    unlabelled_feed = Feed(unlabelled, SampleOrder(len(unlabelled), 12, unlabelled_seed(seed)), data, topology)
    return Feed(labelled, SampleOrder(len(labelled), 4, seed), data, topology, unlabelled=unlabelled_feed)


def test_a_batch_holds_both_sources_and_no_label_of_the_second():
    feed = feed_of(few_labels(TABLE, 2), TABLE.without_labels())
    batches = [*feed.batches(0, 13)]
    rows = np.concatenate([batch.unlabelled.row for batch in batches])
    assert {len(batch.row) for batch in batches} == {4} and {len(batch.unlabelled.row) for batch in batches} == {12}
    for epoch in np.split(rows[:150], 3):
        assert sorted(epoch) == [*range(50)]
    for batch in batches:
        assert (np.asarray(batch.unlabelled.label) == -1).all() and batch.unlabelled.mask.all()
        assert (np.asarray(batch.unlabelled.image) == TABLE.images[np.asarray(batch.unlabelled.row)]).all()
    # A run that continues at a step reads the same batches.
    for batch, again in zip(batches[7:], feed.batches(7, 13), strict=True):
        assert (batch.unlabelled.row == again.unlabelled.row).all() and (batch.row == again.row).all()


def test_the_fields_of_a_batch_are_known_without_reading_one():
    feed = feed_of(few_labels(TABLE, 2), TABLE.without_labels())
    abstract, batch = feed.abstract_batch(), next(feed.batches(0, 1))
    for shapes, arrays in ((abstract, batch), (abstract.unlabelled, batch.unlabelled)):
        for expected, array in zip(shapes[:5], arrays[:5], strict=True):
            assert (expected.shape, expected.dtype) == (array.shape, array.dtype)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    return write_arrays(tmp_path_factory.mktemp("arrays") / "set.npz", TABLE, random_table(9, seed=1))


def opened(path, **options):
    data = DataConfig(path=str(path), image_size=6, resize=6, crop="whole", **options)
    return labelled_and_unlabelled(open_tables(data)[0], data)


def test_the_training_images_are_the_second_source(arrays):
    train, unlabelled = opened(arrays, labels_per_class=2, unlabelled="train")
    assert isinstance(unlabelled, ArrayTable)
    assert (len(train), len(unlabelled), unlabelled.num_classes) == (10, 50, 0)
    assert (unlabelled.images == TABLE.images).all() and (unlabelled.labels == -1).all()
    assert opened(arrays)[1] is None and len(opened(arrays)[0]) == 50
    other, _ = opened(arrays, labels_per_class=2, labels_seed=1)
    assert train.fingerprint != other.fingerprint


def test_the_second_source_is_a_folder_a_list_or_a_data_set_of_any_classes(arrays, tmp_path):
    for row, name in enumerate(("a.png", "few/b.png", "few/more/c.png")):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(TABLE.images[row]).save(tmp_path / "images" / name)
    (tmp_path / "images" / "list.csv").write_text("path,label\na.png,cat;dog\nfew/b.png,eel\n")
    files = tmp_path / "images"

    def images(place, **options) -> ExampleTable:
        _, table = opened(arrays, unlabelled=str(place), **options)
        assert isinstance(table, ExampleTable) and table.num_classes == 0 and (table.labels == -1).all()
        return table

    assert [images(files).record(row).id for row in range(3)] == ["a.png", "few/b.png", "few/more/c.png"]
    assert len(images(files / "list.csv")) == 2
    # A set of other classes than the selected ones; if it has splits, only its training split is used.
    for place in ("train/x", "train/y", "val/x"):
        (tmp_path / "set" / place).mkdir(parents=True)
        Image.fromarray(TABLE.images[0]).save(tmp_path / "set" / place / "a.png")
    assert len(images(tmp_path / "set", classes="0:2")) == 2
    assert len(opened(arrays, unlabelled=str(arrays), classes="0:2")[1]) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unlabelled": "nowhere"}, "data.unlabelled: nowhere: no such file or folder; check the path"),
        ({"unlabelled": "{tmp}"}, "data.unlabelled: {tmp}: no image below this folder; check the path"),
        ({"unlabelled": "{tmp}/b.npz"}, "data.unlabelled: data.image_size=6: images in memory are used as they are;"),
        ({"labels_per_class": 40}, "data.labels_per_class=40: there are 6 examples of class "),
    ],
)
def test_a_second_source_that_cannot_be_opened_raises_a_one_line_error(arrays, tmp_path, options, message):
    if "b.npz" in str(options):
        write_arrays(tmp_path / "b.npz", random_table(9, image=8), random_table(5, image=8))
    options = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(InputError, match=f"^{message.format(tmp=tmp_path)}"):
        opened(arrays, **options)
