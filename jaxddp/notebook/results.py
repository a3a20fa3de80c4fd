"""The functions of the Python API besides training: open data, measure, draw and export states, and load runs."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import Config, DataConfig
from jaxddp.config.values import checked, plain
from jaxddp.core.errors import InputError, Key
from jaxddp.core.files import check_path
from jaxddp.core.ranges import HeldOut, Range
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.labels import labels_of
from jaxddp.data.opening import open_full_splits
from jaxddp.data.selection import chosen_images
from jaxddp.data.source import Source, check_source
from jaxddp.data.storage.root import find_dataset
from jaxddp.data.united import UnitedSource
from jaxddp.engine.example_loss import Loss
from jaxddp.engine.state import TrainState
from jaxddp.inference.exports import write_weights
from jaxddp.inference.run_evaluation import evaluate as evaluate_checkpoint
from jaxddp.inference.trained import TrainedRun, explain_program, restore_run
from jaxddp.job.environment import find_job
from jaxddp.losses import softmax_cross_entropy
from jaxddp.mesh import Device, Topology
from jaxddp.metrics import TopK
from jaxddp.models.variables import by_path
from jaxddp.notebook.arguments import errors_name_arguments
from jaxddp.setup.input_figure import input_figure
from jaxddp.setup.resources import check_comparable, join_job
from jaxddp.setup.run_setup import RunSetup, check_setup, check_state
from jaxddp.training.evaluation import ImagePredictor
from jaxddp.training.events import MAX_SHOWN
from jaxddp.workdir.saved_state import recipe_of_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    write_weights(Path(out), setup.model, host_arrays, setup.topology.peers)


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
    if isinstance(setup.resources.train, UnitedSource):
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
        check_comparable(table, setup.resources.train, setup.config.data)
    rows = np.arange(min(count, len(table)))
    names = table.class_names or setup.resources.train.class_names
    images = chosen_images(table, setup.config.data.of_evaluation, rows)
    pixels = "normalized" if np.issubdtype(images.dtype, np.floating) else None
    few = ArrayTable(images, table.labels[rows], names, pixels)
    if explain:
        num_classes = setup.resources.train.num_classes
        program, _ = explain_program(setup.measured, setup.topology, images.shape[1:], num_classes, images.dtype)
    else:
        program = setup.programs.classify(setup.measured, setup.topology)
    options = setup.config.data, setup.topology, setup.feed.order.batch_size, explain
    return prediction_grid(ImagePredictor(program, few, rows, *options)(state))


@errors_name_arguments()
def load_run(
    workdir: str | Path, step: str | int = "best", *, model: Any = None, devices: int | Sequence[Device] | None = None
) -> TrainedRun:
    """Load a trained run for inference: `load_run("runs/cats").predict("photos")`.

    Args:
        workdir: the work directory of the run. The training data are not needed.
        step: "best" (the latest if the run was not validated), "latest", or the step of a checkpoint.
        model: the network of a run of the Python API. The work directory of such a run does not name its network.
        devices: the number of this job's devices to use, or a list of devices; None for all.

    Returns:
        The trained run, with methods for predictions.

    Raises:
        InputError: there is no such run or checkpoint, or the checkpoint is of another model.
    """
    directory = Path(files.check_path(workdir, "workdir"))
    peers = join_job(find_job(), Config().parallel)
    return restore_run(directory, _which(step), Topology.create(devices, peers), model)


@errors_name_arguments({"data.path": "data", "eval.batch_size": "batch_size"})
def evaluate_run(
    workdir: str | Path, step: str | int = "latest", *, data: str | Path | None = None, batch_size: int | None = None
) -> dict[str, float]:
    """Validate a checkpoint of a run on all devices, like `jaxddp eval RUN`.

    Args:
        workdir: the work directory of the run. Its network must come from a config or a recipe file.
        step: "latest", "best", or the step of a checkpoint.
        data: the path of the run's data, if they were moved.
        batch_size: the global batch size, which is divided among the devices. Default: the run's `eval.batch_size`.

    Returns:
        The metrics by name, with `count` and `step`.

    Raises:
        InputError: there is no such run or checkpoint, or no such data.
    """
    directory = files.expanded(files.check_path(workdir, "workdir"))
    file = recipe_of_run(directory)
    # The devices of the run are not part of its recipe.
    changes: dict[str, dict[str, Any]] = {"parallel": plain(Config().parallel)}
    if data is not None:
        changes["data"] = {"path": str(files.check_path(data, "data")), "name": None}
    if batch_size is not None:
        changes["eval"] = {"batch_size": batch_size}
    return evaluate_checkpoint(
        dataclasses.replace(file, config=file.config.replace(**changes)), directory, _which(step)
    )


def _which(step: str | int) -> str:
    return step if isinstance(step, str) else str(checked(step, int, "step"))


@errors_name_arguments(
    {"data.path": "path", "data.val_share": "val_share", "data.classes": "classes", "data.manifest": "manifest"}
)
def open_data(
    path: str | os.PathLike[str],
    val_share: float | None = None,
    *,
    classes: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
) -> tuple[Source, Source]:
    """Open a data set: a folder with one folder per class, or any other format in docs/data.md.

    Args:
        path: a folder, a file, a URL, "hf:OWNER/NAME", "tfds:NAME", or a name in datasets.toml if there is no such
            file.
        val_share: the fraction of each class to hold out, above 0 and below 1, if the data have no validation split.
        classes: a range of classes, "0:200", or their ids, "cats,dogs". Default: the classes of the entry in
            datasets.toml, else all.
        manifest: a manifest of `jaxddp data check`. The SHA-256 of each image is compared with it on every read.

    Returns:
        The training data and the validation data.

    Raises:
        InputError: the data do not exist or are invalid, there is no validation split and no `val_share`, or the
            manifest does not list an image. This function does not open the images.
    """
    place = find_dataset(check_path(path, "path"))
    held_out = checked(val_share, HeldOut | None, "val_share")
    chosen = checked(classes, str | None, "classes") or place.classes
    data = DataConfig(path=place.path, train=place.train, val=place.val, val_share=held_out, classes=chosen)
    if manifest is not None:
        data = replace(data, verify="manifest", manifest=os.fspath(check_path(manifest, "manifest")))
    train, val = open_full_splits(data).values()
    return train, val
