"""Figures of training inputs and of predictions, for notebooks."""

from typing import TYPE_CHECKING, Annotated

import numpy as np

from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Range
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.selection import chosen_images
from jaxddp.data.source import Source
from jaxddp.data.united import UnitedSource
from jaxddp.engine.state import TrainState
from jaxddp.inference.trained import LayerPrograms
from jaxddp.notebook.arguments import errors_name_arguments
from jaxddp.notebook.results import check_evaluation, check_one_label
from jaxddp.overrides import checked
from jaxddp.setup.input_figure import input_figure
from jaxddp.setup.resources import check_comparable
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.state_checks import check_setup
from jaxddp.training.evaluation import ImagePredictor
from jaxddp.training.predicted_images import MAX_SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_INPUTS = 1000


@errors_name_arguments()
def show_inputs(setup: RunSetup, count: int = 16, step: int = 1) -> "Figure":
    """Show the first training images of a step after augmentation.

    Args:
        setup: the result of `prepare_training`.
        count: number of images.
        step: number of the step, from 1.

    Returns:
        A Matplotlib figure.

    Raises:
        InputError: an argument has the wrong type, or an image cannot be read.
    """
    check_setup(setup)
    checked(count, Annotated[int, Range(1, _MOST_INPUTS)], "count")
    checked(step, Annotated[int, Range(1, 10**9)], "step")
    return input_figure(setup.feed, setup.preprocess, step, count)


@errors_name_arguments()
def show_predictions(
    state: TrainState, setup: RunSetup, table: Source, count: int = 12, *, explain: bool = False
) -> "Figure":
    """Show the first examples of a table with label, prediction and probability.

    Args:
        state: a trained state.
        setup: the result of `prepare_training`.
        table: the examples.
        count: number of images.
        explain: whether to draw over each image a heat map of the pixels that the predicted class depends on, by
            Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391).

    Returns:
        A Matplotlib figure.

    Raises:
        InputError: with `explain`, if the network has no layer for heat maps; see also `evaluate`.
    """
    check_evaluation(state, setup, table)
    if isinstance(setup.table, UnitedSource):
        raise InputError(
            Key.plain("data.placement", "local"),
            ": pictures of predictions need the same images on all processes",
            advice="load the run in one process",
        )
    checked(count, Annotated[int, Range(1, MAX_SHOWN)], "count")
    checked(explain, bool, "explain")
    check_one_label(table)
    # The import is here, because training needs no matplotlib.
    from jaxddp.training.pictures import prediction_grid

    # A table without labels has no classes.
    if table.class_names:
        check_comparable(table, setup.table, setup.data)
    rows = np.arange(min(count, len(table)))
    names = table.class_names or setup.table.class_names
    images = chosen_images(table, setup.data.of_evaluation, rows)
    pixels = "normalized" if np.issubdtype(images.dtype, np.floating) else None
    few = ArrayTable(images, table.labels[rows], names, pixels)
    if explain:
        programs = LayerPrograms(setup.classifier, images.shape[1:])
        program, _ = programs.explain(setup.table.num_classes, images.dtype)
    else:
        program = setup.classifier.classify()
    options = setup.data, setup.topology, setup.order.batch_size, explain
    return prediction_grid(ImagePredictor(program, few, rows, *options)(state))
