"""The repr of an object is one short line with counts, classes and shapes, without arrays."""

import numpy as np
import pytest
from support.data import random_table
from support.ilsvrc import write_tree
from support.networks import linear_model
from support.runs import setup_of
from support.shared import sgd

import jaxddp
from jaxddp.inference.predictions import Predictions
from jaxddp.training.events import RunStart

NAMES = tuple(f"class {label}" for label in range(1000))
PROBABILITIES = np.full((3, 1000), 0.001, np.float32)


@pytest.fixture(scope="module")
def setup():
    return setup_of(linear_model(), sgd(0.1))


@pytest.fixture(scope="module")
def solutions(tmp_path_factory):
    return jaxddp.train_solutions(write_tree(tmp_path_factory.mktemp("data") / "tree"))


def test_a_repr_has_counts_and_classes(setup, solutions):
    classes = "1,000 classes (class 0, class 1, class 2, ...)"
    arrays = jaxddp.ArrayTable(np.zeros((3, 8, 8, 1), np.uint8), np.zeros(3, int), NAMES)
    assert repr(arrays) == f"ArrayTable(3 examples of {classes}, uint8[3, 8, 8, 1])"
    assert repr(solutions).startswith(f"ExampleTable({len(solutions)} examples of 3 classes (")
    assert repr(setup.feed).startswith(f"Feed(source={setup.resources.train!r}, order={setup.feed.order!r}, ")
    assert str(setup).splitlines()[0] == repr(setup)
    predictions = Predictions(["a", "b", "c"], PROBABILITIES, NAMES, NAMES, {1: "damaged"})
    assert repr(predictions) == f"Predictions(3 images of {classes}, 1 cannot be used)"


def test_no_repr_of_a_users_object_prints_arrays(setup):
    start = RunStart(0, 10, 8, 50, 1, 1, params=setup.state.params, class_names=NAMES)
    for value in (setup, setup.state, setup.feed, start, random_table(50)):
        assert "array(" not in repr(value) and "\n" not in repr(value) and len(repr(value)) < 1000
