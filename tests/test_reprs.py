"""The repr of an object is one short line with counts, classes and shapes, without arrays."""

import jax
import numpy as np
import pytest
from support.data import random_table
from support.ilsvrc import write_tree
from support.networks import linear_model
from support.runs import setup_of
from support.shared import sgd

import jaxddp
from jaxddp.data.order import BalancedOrder
from jaxddp.inference.predictions import Outcome, Predictions
from jaxddp.training.events import PredictedImages, RunStart
from jaxddp.workdir.signature import Signature

NAMES = tuple(f"class {label}" for label in range(1000))
PROBABILITIES = np.full((3, 1000), 0.001, np.float32)


@pytest.fixture(scope="module")
def setup():
    return setup_of(linear_model(), sgd(0.1))


@pytest.fixture(scope="module")
def solutions(tmp_path_factory):
    return jaxddp.train_solutions(write_tree(tmp_path_factory.mktemp("data") / "tree"))


def test_the_repr_of_a_source_has_its_counts_and_classes(solutions):
    arrays = jaxddp.ArrayTable(np.zeros((3, 8, 8, 1), np.uint8), np.zeros(3, int), NAMES)
    assert repr(arrays) == "ArrayTable(3 examples of 1,000 classes (class 0, class 1, class 2, ...), uint8[3, 8, 8, 1])"
    assert repr(solutions).startswith(f"ExampleTable({len(solutions)} examples of 3 classes (") and solutions.name(
        0
    ) in repr(solutions)


def test_the_repr_of_an_order_or_a_feed_has_its_counts(setup):
    order = BalancedOrder.of(np.zeros(50, int), 8, 0)
    assert repr(order) == "BalancedOrder(num_examples=50, batch_size=8, seed=0, classes=ClassRows(50 rows of 1 class))"
    assert repr(setup.feed) == f"Feed({setup.resources.train!r}, {setup.feed.order!r}, 1 device)"


def test_the_repr_of_a_setup_or_a_state_has_its_number_of_parameters(setup):
    count = sum(leaf.size for leaf in jax.tree.leaves(setup.state.params))
    assert repr(setup) == f"RunSetup({count:,} parameters, 50 examples, global batch 8 over 1 device)"
    assert str(setup).splitlines()[0] == repr(setup)
    parameters = f"{count:,} parameters in 1 array)"
    assert repr(setup.state) == f"TrainState(step 0, {parameters}"
    assert repr(setup.like) == f"TrainState({parameters}"
    assert repr(next(setup.batches(0, 1))).startswith("Batch(image=uint8[8, ")


def test_the_repr_of_a_result_has_its_number_of_images():
    predictions = Predictions(["a", "b", "c"], PROBABILITIES, NAMES, NAMES, {1: "damaged"})
    classes = "1,000 classes (class 0, class 1, class 2, ...)"
    assert repr(predictions) == f"Predictions(3 images of {classes}, 1 cannot be used)"
    assert repr(Signature(NAMES, NAMES, (8, 8, 3), "uint8", True)) == f"Signature({classes}, uint8[8, 8, 3])"
    outcome = Outcome(np.array([0, 0, 1]), PROBABILITIES, NAMES, 1200)
    assert repr(outcome) == "Outcome(step 1,200: accuracy 66.67% of 3 images, 1,000 classes)"
    images = PredictedImages.of(np.zeros((3, 8, 8, 1), np.uint8), np.array([0, 0, 1]), PROBABILITIES, NAMES)
    assert repr(images) == "PredictedImages(3 images, 1 wrong)"


def test_no_repr_of_a_users_object_prints_arrays(setup):
    start = RunStart(0, 10, 8, 50, 1, 1, params=setup.state.params, class_names=NAMES)
    for value in (setup, setup.state, setup.feed, start, random_table(50)):
        assert "array(" not in repr(value) and "\n" not in repr(value) and len(repr(value)) < 1000
