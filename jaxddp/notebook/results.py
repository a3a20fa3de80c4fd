"""Measures trained states and exports their weights."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key
from jaxddp.data.labels import labels_of
from jaxddp.data.source import Source, check_source
from jaxddp.engine.example_loss import Loss
from jaxddp.engine.state import TrainState
from jaxddp.inference.exports import write_weights
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.metrics.top_k import TopK
from jaxddp.models.variables import by_path
from jaxddp.notebook.arguments import errors_name_arguments
from jaxddp.overrides import checked
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.state_checks import check_state


@errors_name_arguments()
def evaluate(state: TrainState, setup: RunSetup, table: Source, loss: Loss = softmax_cross_entropy) -> dict[str, float]:
    """Measure a state on a table, each example once.

    If the state has averaged parameters (`ema`), these are measured.

    Args:
        state: a trained state.
        setup: the result of `prepare_training`.
        table: the examples.
        loss: the loss to measure, as for `train`.

    Returns:
        The means of the loss and the metrics by name, with `count`.

    Raises:
        InputError: an argument has the wrong type, the state is of another network, or the table has other classes or
            another image format than the training data.
    """
    check_evaluation(state, setup, table)
    return setup.with_loss(loss).evaluator(table)(state)


@errors_name_arguments()
def topk_accuracy(
    state: TrainState, setup: RunSetup, table: Source, k: int | Iterable[int] = (1, 5, 10)
) -> dict[int, float]:
    """Measure the fraction of examples whose label is among the k largest logits.

    If the state has averaged parameters (`ema`), these are measured.

    Args:
        state: a trained state.
        setup: the result of `prepare_training`.
        table: the examples.
        k: one or several numbers.

    Returns:
        The accuracy for each k.

    Raises:
        InputError: a k is below 1 or above the number of classes; see also `evaluate`.
    """
    check_evaluation(state, setup, table)
    check_one_label(table)
    several = k if isinstance(k, Iterable) and not isinstance(k, str) else [k]
    ks = [checked(number, int, "k") for number in several]
    for number in ks:
        if not 1 <= number <= table.num_classes:
            raise InputError(Key("k", number), f": expected 1 to {table.num_classes}, the number of classes")
    measured = setup.evaluator(table, metrics={f"top{number}": TopK(number) for number in ks})(state)
    return {number: measured[f"top{number}"] for number in ks}


@errors_name_arguments()
def export_weights(state: TrainState, setup: RunSetup, out: str | Path) -> None:
    """Write the weights that evaluation uses to a .safetensors file.

    The arrays of a network of torchvision or timm have the published names and layout. The names of other arrays are
    their paths in the network, with dots. `prepare_training(..., weights=out)` loads the file.

    Args:
        state: a trained state.
        setup: the result of `prepare_training`.
        out: the path of the file.

    Raises:
        InputError: an argument has the wrong type, or the file cannot be written.
    """
    check_state(state, setup)
    files.check_path(out, "out")
    arrays = by_path(state.eval_params, state.model_state)
    host_arrays = {path: np.asarray(leaf) for path, leaf in arrays.items()}
    write_weights(Path(out), setup.recipe.model, host_arrays, setup.topology.peers)


def check_one_label(table: Source) -> None:
    """Raise `InputError` if images can have several labels."""
    if labels_of(table).several:
        raise InputError(
            "table: its images may have several labels, and this function takes one; use the metrics of evaluate"
        )


def check_evaluation(state: TrainState, setup: RunSetup, table: Source) -> None:
    """Check that a state can be measured on a table. Raises: InputError."""
    check_state(state, setup)
    check_source(table, "table")
