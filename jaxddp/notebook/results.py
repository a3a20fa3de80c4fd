"""The functions of the Python API besides training, and the arguments of the API: their checks, and their keys."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxddp.core.files as files
from jaxddp.config import CheckpointConfig, Config, DataConfig, ObjectiveConfig, ParallelConfig, TrainConfig
from jaxddp.config.registry import OBJECTIVES, check_read
from jaxddp.config.values import Names, checked, nested, plain
from jaxddp.core.errors import InputError, JaxddpError, Key, choices, first_line, refused, shaped
from jaxddp.core.files import check_path
from jaxddp.core.ranges import HeldOut, Range
from jaxddp.core.user_code import describing_errors
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.opening import chosen_images, open_full_splits
from jaxddp.data.source import Source, check_source, labels_of
from jaxddp.data.storage.root import find_dataset
from jaxddp.data.united import UnitedSource
from jaxddp.engine.objective import Loss
from jaxddp.engine.state import TrainState
from jaxddp.inference.exports import write_weights
from jaxddp.inference.trained import TrainedRun, explain_program, restore_run
from jaxddp.inference.trained import evaluate as evaluate_checkpoint
from jaxddp.job.environment import find_job
from jaxddp.losses import softmax_cross_entropy
from jaxddp.mesh import Device, Topology
from jaxddp.metrics import TopK
from jaxddp.models.interface import by_path
from jaxddp.setup.input_figure import input_figure
from jaxddp.setup.resources import check_comparable, join_job
from jaxddp.setup.run_setup import RunSetup, check_setup, check_state
from jaxddp.setup.user_objects import UserObject, check_name
from jaxddp.training.evaluation import ImagePredictor, Measure
from jaxddp.training.events import MAX_SHOWN
from jaxddp.workdir.saved_state import recipe_of_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Epochs = Annotated[float, Range(0, 10**9, above=True)]


def _keys(section: type, *left_out: str) -> list[str]:
    return [each.name for each in dataclasses.fields(section) if each.name not in left_out]


_BY_SECTION = {
    "model": ["cpu_convolutions", "freeze", "new_layers", "offline", "unfreeze", "weights"],
    "optimizer": ["clip_norm", "groups", "layer_decay", "rate_factors"],
    "train": _keys(TrainConfig, "batch_size", "duration", "label_smoothing"),
    "checkpoint": _keys(CheckpointConfig, "every", "keep"),
    "parallel": _keys(ParallelConfig, "devices", "cpu_devices", "groups", "check_replicas", "self_test"),
    "log": ["gradient_norm"],
    "objective": _keys(ObjectiveConfig, "name"),
}
OPTIONS = {name: f"{section}.{name}" for section, names in _BY_SECTION.items() for name in names}
"""The key of each option of `prepare_training`. `groups` is an option of the optimizer."""
OPTIONS["device_groups"] = "parallel.groups"

_NAMES = {
    **{key: option for option, key in OPTIONS.items()},
    **{"log.every": "log_every", "eval.every": "eval_every", "checkpoint.every": "save_every"},
    **{"log.profile": "profile", "parallel.check_replicas": "check_every", "parallel.self_test": "self_test"},
    "train.duration": "epochs",
    "train.batch_size": "batch_size_per_device",
    "eval.batch_size": "batch_size_per_device",
    "parallel.devices": "devices",
    "model.batch_norm": "batch_norm",
    "model.weight_init": "weight_init",
    "model.name": "model",
    "objective.name": "objective",
    **{f"log.{key}": f"log_{key}" for key in ("to", "project", "name", "config")},
    "data.unlabelled": "unlabelled",
    "fingerprint.train": "table.fingerprint",
    "fingerprint.unlabelled": "unlabelled.fingerprint",
    "workdir": "workdir",
    "the config": "the model and optimizer",
}
"""The argument of each key of a config."""

_OBJECTS = "objects."
"""Prefix of the keys of config.json that identify objects from arguments."""


def config_of_options(options: Mapping[str, Any], objective: Any, seed: int, other_names: Iterable[str] = ()) -> Config:
    """Return the config of the options of `prepare_training`.

    Args:
        objective: a name or a function.
        other_names: names of the other arguments, for suggestions if an option is unknown.

    Raises:
        InputError: an option is unknown, or has no effect.
    """
    for name in options.keys() - OPTIONS:
        raise InputError(f"prepare_training: unknown option {name!r}; {choices(name, {*OPTIONS, *other_names})}")
    values = {OPTIONS[name]: value for name, value in options.items()}
    if isinstance(shares := options.get("shares"), tuple | list):
        values["parallel.shares"] = ",".join(map(str, shares))
    if isinstance(objective, str):
        values["objective.name"] = objective
    # `unlabelled_ratio` is allowed, because it sets the size of the unlabelled batches of any objective.
    elif of_name := [key for key in values if key.startswith("objective.") and key != "objective.unlabelled_ratio"]:
        advice = "pass the value to the function instead"
        raise InputError(Key(of_name[0], values[of_name[0]]), ": the objective is a function", advice=advice)
    config = Config().replace(seed=seed, **nested(values))
    check_read(config, () if isinstance(objective, str) else (OBJECTIVES.hook,))
    return config


def log_settings(
    log_to: str | Sequence[str], project: str | None, name: str | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the values of the config section `log` for the arguments of loggers. Raises: InputError."""
    words = tuple(f"{key}={value}" for key, value in checked(config or {}, dict, "log_config").items())
    settings = {"to": ("jsonl", *checked(log_to, Names, "log_to")), "project": project, "name": name, "config": words}
    Config().replace(log=settings).log.check()
    return settings


def check_workdir_for(workdir: Any, profile: Any, log_to: Any) -> None:
    """Raise `InputError` if an argument needs a work directory and there is none."""
    if workdir is None and (profile or log_to):
        file = (Key("profile", profile), ": a trace") if profile else (Key("log_to", log_to), ": the output of loggers")
        raise InputError(file, " is written into the work directory", advice="give workdir too")


@contextmanager
def errors_name_arguments(names: Mapping[str, str] = _NAMES) -> Iterator[None]:
    """Rename keys and options in the errors of the block to the arguments in `names`.

    Errors in the user's code get a line with file, line and function; see `jaxddp.core.user_code.describing_errors`.
    """
    try:
        with describing_errors():
            yield
    except JaxddpError as error:
        error.rename_keys(lambda key: as_argument(key, names))
        raise


def as_argument(key: Key, names: Mapping[str, str] = _NAMES) -> str:
    """Return the argument of a key: `train.accumulate=4` becomes `accumulate=4`.

    A batch size becomes "a global batch of 256", because the argument of `prepare_training` is the batch
    size of one device.
    """
    argument = key.name.removeprefix(_OBJECTS)
    name = argument if argument != key.name else names.get(key.name)
    if name is None:
        return str(key)
    if key.has_value and key.name.endswith(".batch_size"):
        return f"a global batch of {key.shown_value}"
    return f"{name}={key.shown_value}" if key.has_value else name


_TABLE = "the table is used as it is; open_data has arguments for classes and val_share, and table.take(N) returns"
_FROM_PYTHON = {
    **{key: f"{_TABLE} fewer examples" for key in ("limit", "classes", "val_share")},
    "labels_per_class": "give the table that jaxddp.data.opening.few_labels makes",
    "unlabelled": "give a table as unlabelled",
    "verify": "give the table that open_data(PATH, manifest=FILE) opens",
}
"""What to give instead of a key of `data` that a table decides, by the key."""


def check_data(data: Any) -> DataConfig | None:
    """Check the argument `data` and return it. Raises: InputError."""
    if data is None:
        return None
    if not isinstance(data, DataConfig):
        raise refused("data", data, "give a jaxddp.DataConfig, such as DataConfig(image_size=64)")
    for key, advice in _FROM_PYTHON.items():
        if (value := getattr(data, key)) not in (None, "first", "never"):
            raise InputError(Key(f"data.{key}", value), f": from Python, {advice}")
    check_read(Config(data=data))
    return data


def check_unlabelled(source: Any) -> Source | None:
    """Check the argument `unlabelled`, and return it without its labels; None stays None. Raises: InputError."""
    if source is None:
        return None
    if not hasattr(check_source(source, "unlabelled"), "without_labels"):
        raise refused("unlabelled", source, "it has no without_labels; see jaxddp.data.source.Table")
    return source.without_labels()


def check_schedule(schedule: Any) -> optax.Schedule | None:
    """Check that JAX can trace a schedule, and return it. Raises: InputError if it fails or returns no number."""
    if schedule is None:
        return None
    description = "the step, such as optax.cosine_decay_schedule(1.0, steps)"
    function = UserObject(schedule, "schedule").function(description, "step")
    try:
        found = jax.eval_shape(lambda step: jnp.asarray(function(step)), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        reason = f"fails for a step int32[] ({type(error).__name__}: {first_line(error)})"
        raise InputError(f"schedule: {reason}; give a function that JAX can trace") from error
    if found.shape:
        raise InputError(f"schedule: returned {shaped(found)} for a step; return one number")
    return schedule


def check_evaluators(evaluators: Any, setup: RunSetup) -> list[Measure]:
    """Check functions of the state that return metrics, and return functions that also check their results.

    Raises:
        InputError: an object is no function, or validation is disabled. The returned functions raise it if a result is
            not a dict of numbers.
    """
    if isinstance(evaluators, str) or not isinstance(evaluators, Sequence):
        raise refused("evaluators", evaluators, "give a list of functions of the state")
    functions = [UserObject(each, "evaluators").function("the state", "state") for each in evaluators]
    if functions and setup.validated is None:
        needed = "give val too" if setup.resources.val is None else "eval_every disables evaluation"
        raise InputError(f"evaluators=[{', '.join(map(_name, functions))}]: they are measured at evaluations; {needed}")
    return [_with_numbers(function) for function in functions]


def _with_numbers(evaluator: Measure) -> Measure:
    """Return a function that calls `evaluator` and checks its result."""

    def measure(state: TrainState) -> dict[str, float]:
        found, where = evaluator(state), f"evaluators: {_name(evaluator)}"
        if not isinstance(found, Mapping):
            raise InputError(f"{where} returned an object of type {type(found).__name__}; return a dict of numbers")
        numbers = {}
        for name, value in found.items():
            check_name(name, where)
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                raise refused(f"{where} returned {name}", value, "return a number") from None
        return numbers

    return measure


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def check_length(before: Config, after: Config) -> None:
    """Raise `InputError` if a key depends on the length of a run and the length was changed."""
    if before.train.duration == after.train.duration:
        return
    changed = f"a run of {before.train.duration}, but the length is now {after.train.duration}"
    advice = "give the new length to prepare_training"
    if before.train.lookahead is not None:
        slow = f": the last step takes over the slow weights, and the setup was prepared for {changed}"
        raise InputError(Key("train.lookahead"), slow, advice=advice)
    times = {("model.unfreeze", f": {layer}="): time for layer, time in before.model.unfreeze_times.items()}
    if before.data.grow_from is not None:
        times |= {("data.grow_start", "="): before.data.grow_start, ("data.grow_end", "="): before.data.grow_end}
    for (key, equals), duration in times.items():
        if duration.unit == "%":
            share = f"{equals}{duration} is a fraction of {changed}"
            raise InputError(Key(key), share, advice=f"{advice}, or use epochs or steps")


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
