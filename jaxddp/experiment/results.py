"""What came out of a training, measured and looked at."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxddp.data.batch import Batch
from jaxddp.data.source import Source
from jaxddp.engine.loss import Loss
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import make_predict
from jaxddp.errors import InputError
from jaxddp.experiment.setup import RunSetup
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.metrics.top_k import TopK
from jaxddp.training.predictions import Predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def evaluate(state: TrainState, setup: RunSetup, table: Source, loss: Loss = softmax_cross_entropy) -> dict[str, float]:
    """Means of the loss, top-1 and top-5 over a table, each example once, with their `count`."""
    return setup.with_loss(loss).evaluator(table)(state)


def topk_accuracy(state: TrainState, setup: RunSetup, table: Source, k: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """The share of a table's examples whose label is among the k largest logits, for each k.

    Raises:
        InputError: a k below 1 or above the number of classes.
    """
    for each in k:
        if not 1 <= each <= table.num_classes:
            raise InputError(f"k={each}: expected 1 to {table.num_classes}, the number of classes")
    measured = setup.evaluator(table, metrics={f"top{each}": TopK(each) for each in k})(state)
    return {each: measured[f"top{each}"] for each in k}


def show_predictions(state: TrainState, setup: RunSetup, table: Source, count: int = 12) -> "Figure":
    """The first `count` examples of a table with label, prediction and probability, as a figure for a notebook."""
    # A machine that only trains needs no matplotlib.
    from jaxddp.training.pictures import prediction_grid

    predict = make_predict(setup.eval_objective(), setup.topology)
    batches: list[tuple[Batch, np.ndarray]] = []
    for batch in setup.feed.eval_batches(table, setup.order.batch_size):
        batches.append((batch, np.asarray(jax.nn.softmax(predict(state, batch)))))
        if sum(int(b.mask.sum()) for b, _ in batches) >= count:
            break
    images, labels, probabilities = (
        np.concatenate(parts)[: min(count, len(table))]
        for parts in zip(*[(np.asarray(b.image), np.asarray(b.label), p) for b, p in batches], strict=True)
    )
    # A listing without labels has no classes of its own.
    class_names = table.class_names or setup.table.class_names
    return prediction_grid(Predictions.of(images, labels, probabilities, class_names))
