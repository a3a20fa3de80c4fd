"""What came out of a training, measured and looked at."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.data.example_set import labels_of
from jaxddp.data.source import Source, check_source
from jaxddp.engine.example_loss import Loss
from jaxddp.engine.state import TrainState
from jaxddp.inference.exported_weights import write_weights
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.metrics.top_k import TopK
from jaxddp.models.variables import by_path
from jaxddp.notebook.arguments import words_of_arguments
from jaxddp.overrides import checked
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.state_checks import check_state


@words_of_arguments()
def evaluate(state: TrainState, setup: RunSetup, table: Source, loss: Loss = softmax_cross_entropy) -> dict[str, float]:
    """Means of the loss, top-1 and top-5 over a table, each example once, with their `count`.

    Of a state with averaged parameters (`ema`) they are those of the average, as are predictions.

    Raises:
        InputError: an argument is of another kind, or the state of another network; or the table is not like the one
            that was trained on.
    """
    check_measured(state, setup, table)
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
    check_measured(state, setup, table)
    check_one_label(table)
    several = k if isinstance(k, Iterable) and not isinstance(k, str) else [k]
    wanted = [checked(each, int, "k") for each in several]
    for each in wanted:
        if not 1 <= each <= table.num_classes:
            raise InputError(Key("k", each), f": expected 1 to {table.num_classes}, the number of classes")
    measured = setup.evaluator(table, metrics={f"top{each}": TopK(each) for each in wanted})(state)
    return {each: measured[f"top{each}"] for each in wanted}


@words_of_arguments()
def export_weights(state: TrainState, setup: RunSetup, out: str | Path) -> None:
    """Write the weights that evaluation measures as a .safetensors file.

    A network that torchvision or timm published has their names and layout, and any other its own paths with dots.
    `prepare_training(..., weights=out)` starts from them. Raises: InputError; an argument is of another kind,
    or the file cannot be written.
    """
    check_state(state, setup)
    files.check_path(out, "out")
    arrays = by_path(state.eval_params, state.model_state)
    own = {path: np.asarray(leaf) for path, leaf in arrays.items()}
    write_weights(Path(out), setup.recipe.model, own, setup.topology.peers)


def check_one_label(table: Source) -> None:
    """Raises `InputError` where an image may have several labels."""
    if labels_of(table).several:
        raise InputError("table: its images may have several labels, and this takes one; see the metrics of evaluate")


def check_measured(state: TrainState, setup: RunSetup, table: Source) -> None:
    """See that a state can be measured over a table. Raises: InputError."""
    check_state(state, setup)
    check_source(table, "table")
