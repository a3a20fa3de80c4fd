"""What came out of a training, measured and looked at."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import numpy as np

from jaxddp.data.arrays import ArrayTable
from jaxddp.data.chosen import chosen_images
from jaxddp.data.labels import is_multi_label
from jaxddp.data.source import Source, check_source
from jaxddp.engine.loss import Loss
from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError
from jaxddp.experiment.argument_kinds import check_state
from jaxddp.experiment.arguments import words_of_arguments
from jaxddp.experiment.resources import check_comparable
from jaxddp.experiment.setup import RunSetup
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.metrics.top_k import TopK
from jaxddp.overrides import checked
from jaxddp.ranges import Range
from jaxddp.training.predictor import Predictor
from jaxddp.training.shown import MOST_SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@words_of_arguments()
def evaluate(state: TrainState, setup: RunSetup, table: Source, loss: Loss = softmax_cross_entropy) -> dict[str, float]:
    """Means of the loss, top-1 and top-5 over a table, each example once, with their `count`.

    Of a state with averaged parameters (`ema`) they are those of the average, as are predictions.

    Raises:
        InputError: an argument is of another kind, or the state of another network; or the table is not like the one
            that was trained on.
    """
    _check(state, setup, table)
    return setup.with_loss(loss).evaluator(table)(state)


@words_of_arguments()
def topk_accuracy(
    state: TrainState, setup: RunSetup, table: Source, k: int | Iterable[int] = (1, 5, 10)
) -> dict[int, float]:
    """The share of a table's examples whose label is among the k largest logits, for each k, or for one.

    It is of the parameters that `evaluate` measures.

    Raises:
        InputError: a k below 1 or above the number of classes, or as `evaluate`.
    """
    _check(state, setup, table)
    _check_one_label(table)
    several = k if isinstance(k, Iterable) and not isinstance(k, str) else [k]
    wanted = [checked(each, int, "k") for each in several]
    for each in wanted:
        if not 1 <= each <= table.num_classes:
            raise InputError(f"k={each}: expected 1 to {table.num_classes}, the number of classes")
    measured = setup.evaluator(table, metrics={f"top{each}": TopK(each) for each in wanted})(state)
    return {each: measured[f"top{each}"] for each in wanted}


@words_of_arguments()
def show_predictions(state: TrainState, setup: RunSetup, table: Source, count: int = 12) -> "Figure":
    """The first `count` examples of a table with label, prediction and probability, as a figure for a notebook.

    Raises: as `evaluate`.
    """
    _check(state, setup, table)
    checked(count, Annotated[int, Range(1, MOST_SHOWN)], "count")
    _check_one_label(table)
    # A machine that only trains needs no matplotlib.
    from jaxddp.training.pictures import prediction_grid

    # A listing without labels has no classes of its own.
    if table.class_names:
        check_comparable(table, setup.table, setup.data)
    rows = np.arange(min(count, len(table)))
    names = table.class_names or setup.table.class_names
    few = ArrayTable(chosen_images(table, setup.data.of_evaluation, rows), table.labels[rows], names)
    return prediction_grid(
        Predictor(setup.classifier.classify(), few, setup.data, setup.topology, setup.order.batch_size)(state)
    )


def _check_one_label(table: Source) -> None:
    if is_multi_label(table):
        raise InputError("table: its images may have several labels, and this takes one; see the metrics of evaluate")


def _check(state: TrainState, setup: RunSetup, table: Source) -> None:
    check_state(state, setup)
    check_source(table, "table")
