"""Public Python API: prepare a training, inspect it, run it, and show the results.

setup = prepare_training(model, train_table, None, optax.sgd(0.1, momentum=0.9), 32, epochs=5)
state, history = train(softmax_cross_entropy, setup, val=val_table)
history
"""

import dataclasses
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import optax

import jaxddp.arguments as arguments
import jaxddp.core.files as files
import jaxddp.data.stream.tf_data as tf_data
from jaxddp.arguments import errors_name_arguments
from jaxddp.augment.preprocess import Augmentation
from jaxddp.config import AugmentConfig, Config, DataConfig, ModelConfig
from jaxddp.config.data_section import TABLE_KEYS
from jaxddp.config.tree import BatchSize
from jaxddp.config.values import check_values, checked, plain, replaced
from jaxddp.core.errors import InputError, Key, choices
from jaxddp.core.ranges import HeldOut, Range
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.formats.ilsvrc import test_listing, train_solutions, val_solutions
from jaxddp.data.opening import open_full_splits
from jaxddp.data.sample import write_sample
from jaxddp.data.source import Source, check_comparable, check_labelled, check_source, labels_of
from jaxddp.data.storage.root import find_dataset
from jaxddp.data.table import ExampleTable
from jaxddp.data.united import UnitedSource
from jaxddp.engine.initial_state import Transform
from jaxddp.engine.objective import Loss, Metric
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState
from jaxddp.inference.calibrated import calibrated
from jaxddp.inference.exports import export_program, write_weights
from jaxddp.inference.pretrained import measure_network
from jaxddp.inference.trained import TrainedRun, evaluate_checkpoint, restore_run
from jaxddp.job.environment import find_job
from jaxddp.losses import DEFAULT_LOSSES, sigmoid_cross_entropy, softmax_cross_entropy
from jaxddp.mesh import Device, Topology
from jaxddp.metrics import DEFAULT_METRICS, TopK
from jaxddp.models.adapt import adapt, without_adapters
from jaxddp.models.families import ResNetSettings
from jaxddp.models.interface import own_arrays
from jaxddp.models.resnet import ResNet, build
from jaxddp.objectives.distillation import distillation
from jaxddp.setup.identity import shared_settings
from jaxddp.setup.input_figure import input_figure
from jaxddp.setup.recipe import make_recipe
from jaxddp.setup.resources import join_job, resources_of
from jaxddp.setup.run_setup import RunSetup, check_setup, check_state
from jaxddp.setup.run_setup import initialize as initialize_network
from jaxddp.setup.run_training import train as train_run
from jaxddp.setup.user_objects import check_listeners, objects_of_arguments
from jaxddp.training.evaluation import Measure
from jaxddp.training.events import MAX_SHOWN, Listener, StopTraining
from jaxddp.training.listeners.jsonl import History
from jaxddp.training.progress import progress
from jaxddp.workdir.saved_state import recipe_of_run
from jaxddp.workdir.signature import Signature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AugmentConfig", "Config", "DataConfig", "InputError", "RunSetup", "adapt", "prepare_training", "resnet"]
__all__ += ["ArrayTable", "ExampleTable", "open_data", "test_listing", "train_solutions", "val_solutions"]
__all__ += ["History", "Listener", "distillation", "sigmoid_cross_entropy", "softmax_cross_entropy", "train"]
__all__ += ["StopTraining", "TrainedRun", "evaluate", "evaluate_run", "export_program", "export_weights", "load_run"]
__all__ += ["show_inputs", "show_predictions", "tf_dataset", "topk_accuracy", "write_sample"]


@errors_name_arguments()
def resnet(
    name: str, num_classes: int, *, dtype: Any = "float32", param_dtype: Any = "float32", **options: Any
) -> ResNet:
    """Return a ResNet by name, such as "resnet18", "resnet50d", "seresnet50", "resnext50_32x4d" or "wide_resnet50_2".

    Args:
        name: the name of the network.
        num_classes: number of logits.
        dtype: dtype of the computation. "bfloat16" is faster on a GPU.
        param_dtype: dtype of the parameters.
        options: other keys of a config's `model`, see `jaxddp.config.ModelConfig`: `width`, `stem` ("imagenet", or
            "small" for images of about 32 pixels), `batch_norm` ("local", "sync", or "ghost:32", for which each
            device's batch must be a multiple of 32), `zero_init_last_scale`, `shortcut_norm`, `weight_init`,
            `blur_pool`.

    Returns:
        A Flax module that maps images [B, H, W, C] to logits [B, num_classes].

    Raises:
        InputError: the name, an option or a dtype is unknown. The message suggests the most similar known one.
    """
    known = [field.name for field in dataclasses.fields(ResNetSettings)]
    if unknown := sorted(options.keys() - {*known}):
        raise InputError(f"resnet: unknown option {unknown[0]!r}; {choices(unknown[0], known)}")
    settings = replaced(ModelConfig(), {"name": name, **options})
    check_values(settings)
    return build(settings, checked(num_classes, int, "num_classes"), dtype, param_dtype)


@errors_name_arguments()
def prepare_training(
    model: Any,
    table: Source,
    devices: int | Sequence[Device] | None,
    optimizer: optax.GradientTransformation,
    batch_size_per_device: int,
    *,
    epochs: float | str = 1,
    data: DataConfig | None = None,
    seed: int = 0,
    metrics: Mapping[str, Metric] | None = None,
    augmentation: Augmentation | None = None,
    initialize: Transform | None = None,
    parts: Sequence[Part] = (),
    objective: Any = "supervised",
    unlabelled: Source | None = None,
    **options: Any,
) -> RunSetup:
    """Prepare a training: distribute a model, its data and its optimizer over the devices.

    In a script that a launcher started, this also joins the job: call it before anything else uses JAX's devices. From
    then on compiled programs are cached on disk, unless `JAX_ENABLE_COMPILATION_CACHE` is false.

    Args:
        model: a Flax Linen or NNX module, a function of `rngs` that makes an NNX module, or a pair of functions
            (init, apply); see `jaxddp.models.adapt.adapt`.
        table: the training data: from `open_data`, an `ArrayTable` of images, or any `jaxddp.data.source.Source`.
        devices: the number of this job's devices to use, or a list of devices; None for all.
        optimizer: any optax optimizer.
        batch_size_per_device: each device's part of the global batch.
        epochs: length of the training, also as "100 steps" or "50_000 examples".
        data: the preprocessing of images. By default, arrays are only normalized, and files get random-area
            crops of 224 pixels and horizontal flips.
        seed: seed of the initial parameters, the order of examples, augmentation and dropout.
        metrics: functions (logits float[B, K], labels int32[B]) -> float[B] beside top1 and top5, or in their place.
        augmentation: a function (key, image float32[H, W, C]) -> image, which runs on the device after the
            augmentation of `data`.
        initialize: a function of the initial (params, model_state) that returns new ones, before weights are loaded.
        parts: optional parts of the training step, see `jaxddp.engine.parts.part.Part`.
        objective: "supervised", "fixmatch", "distillation", or a function of the supervised objective, such as
            `distillation(run)`; see `jaxddp.engine.objective`.
        unlabelled: a second data source for objectives that use one. Its labels are ignored.
        options: further keys of a config, without their section, such as `accumulate=4`; see docs/extending.md.
            `precision` is the dtype of the computation, to which parameters and images are cast for a network that
            sets no dtypes; with "float16" the loss is scaled.

    Returns:
        A `RunSetup`. Printing it shows which slice of a batch each device gets. Its method `with_seed` returns the
        setup with another seed.

    Raises:
        InputError: an argument is invalid. The message names the argument, its value, and what to do.
    """
    check_labelled(check_source(table, "table"), "training data")
    per_device = checked(batch_size_per_device, BatchSize, "batch_size_per_device")
    length = {"duration": arguments.length_of(epochs)}
    names = inspect.signature(prepare_training).parameters.keys() - {"options"}
    of_train = inspect.signature(train).parameters
    config = arguments.config_of_options({"precision": "float32"} | options, objective, seed, names, of_train)
    config = dataclasses.replace(config, data=arguments.check_data(data) or table.default_data())
    topology = Topology.create(devices, join_job(find_job(), config.parallel))
    config = config.replace(train={"batch_size": per_device * topology.num_devices, **length})
    objects = {"model": model, "optimizer": optimizer, "initialize": initialize, "augmentation": augmentation}
    # `train` may replace this loss.
    objects |= {"metrics": metrics, "parts": parts, "loss": softmax_cross_entropy}
    if not isinstance(objective, str):
        objects["objective"] = objective
    if (form := labels_of(table).form) != "one label":
        config = config.replace(eval={"metrics": DEFAULT_METRICS[form]})
        objects["loss"] = DEFAULT_LOSSES[form]
    resources = resources_of(config, topology, table, arguments.check_unlabelled(unlabelled))
    given = objects_of_arguments(**objects)
    return initialize_network(make_recipe(config, topology, resources, given, precision=options.get("precision")))


@errors_name_arguments()
def train(
    loss: Loss,
    setup: RunSetup,
    *,
    val: Source | None = None,
    schedule: optax.Schedule | None = None,
    epochs: float | str | None = None,
    listeners: Sequence[Any] | None = None,
    evaluators: Sequence[Measure] = (),
    workdir: str | Path | None = None,
    log_to: str | Sequence[str] = (),
    log_project: str | None = None,
    log_name: str | None = None,
    log_config: Mapping[str, Any] | None = None,
    log_every: str = "10 steps",
    eval_every: str = "1 epoch",
    save_every: str = "1 epoch",
    check_every: str = "1000 steps",
    self_test: str = "auto",
    profile: str | None = None,
) -> tuple[TrainState, History]:
    """Train a setup.

    The setup is not changed. If it or the result of its `with_seed` is trained again, no program is compiled again.

    Args:
        loss: a function (logits, labels) that returns the loss of each example, their mean, or (sum, weight); see
            `jaxddp.engine.objective`.
        val: validation data, measured every `eval_every` and at the end.
        schedule: a function of the step number, from 0. The optimizer's updates are multiplied by its result.
        epochs: length of the training from step 0. Default: the setup's. A trained state continues from its step.
        listeners: see `jaxddp.training.events.Listener`. Default: a live display, that of
            `jaxddp.training.progress`; () shows nothing.
        evaluators: functions of a state that return a dict of further metrics. They also get the averaged parameters.
        workdir: folder of checkpoints and metrics.jsonl. An interrupted run is resumed there, and so is one that
            `StopTraining` ended; another ended run is only returned. Another model, loss, optimizer or data
            is an error. SIGTERM makes the run save and stop, and so does the first Ctrl-C.
        log_to: names of loggers in addition to metrics.jsonl, as in a config's `log.to`. They need a workdir.
        log_project, log_name, log_config: project, name and further values (a dict) for "wandb" and "mlflow".
        log_every, eval_every, save_every: how often to log, validate and save: "50 steps", "1 epoch" or "10%".
        check_every: how often to compare the states of all devices, also before each checkpoint; "0 steps": never.
        self_test: compare the averaged gradient with one device's gradient before step 1: "auto", "always" or "never".
        profile: length of a trace for TensorBoard's profiler, such as "10 steps", written to profile/ in the workdir.

    Returns:
        The trained state, and the history of metrics, which a notebook draws. Both are the same on every process.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.core.errors`.
        KeyboardInterrupt: Ctrl-C. After the first one, a run with a workdir has saved.
    """
    check_setup(setup)
    logs = arguments.log_settings(workdir, profile, log_to, log_project, log_name, log_config)
    config = setup.config.replace(
        log={"every": log_every} | logs,
        eval={"every": eval_every, "batch_size": setup.feed.order.batch_size},
        checkpoint={"every": save_every},
        parallel={"check_replicas": check_every, "self_test": self_test},
        train={} if epochs is None else {"duration": arguments.length_of(epochs)},
    )
    arguments.check_length(setup.config, config)
    setup = setup.with_loss(loss)
    source = None if val is None else check_source(val, "val")
    resources = setup.resources.with_val(source, setup.config.data, setup.topology.peers)
    setup = setup.changed(resources=resources, config=config, schedule=arguments.check_schedule(schedule))
    measures = arguments.check_evaluators(evaluators, setup)
    listeners = [progress()] if listeners is None else check_listeners(listeners, "listeners")
    history = History()
    directory = None if workdir is None else Path(files.check_path(workdir, "workdir", in_utf8=True)).absolute()
    given = {"workdir": workdir is not None, "schedule": schedule is not None, "evaluators": len(measures)}
    setup.topology.peers.agree(shared_settings(setup, **given))
    state = train_run(setup, directory, listeners=[*listeners, history], evaluators=measures)
    assert state is not None  # A setup that has ended is restored.
    history.share(setup.topology.peers)
    return state, history


@errors_name_arguments()
def evaluate(
    state: Any, setup: Any, table: Any, loss: Loss | None = None, *, data: DataConfig | None = None
) -> dict[str, float]:
    """Measure a state on a table, or a network that jaxddp has not trained on data, each example once.

    evaluate(state, setup, table) measures a trained state. If it has averaged parameters (`ema`), these are measured.

    evaluate(model, params, data) measures any network on all devices, in the network's own precision, without a setup.

    Args:
        state: a trained state; or a network, as for `prepare_training`.
        setup: the result of `prepare_training`; or the parameters, a dict of Linen's variables ("params",
            "batch_stats"), a dict of the parameters alone, a pair (params, model_state), or None for the weights of an
            NNX module.
        table: the examples; for a network also the path of a data set, whose validation split is used if it has one.
        loss: the loss to measure, as for `train`. Default: a cross-entropy, or squared errors of numbers.
        data: the preprocessing of the images, for a network; as for `prepare_training`.

    Returns:
        The means of the loss and the metrics by name, with `count`.

    Raises:
        InputError: an argument has the wrong type, the state or the parameters are of another network, or the table has
            other classes or another image format than the training data.
    """
    if not any(isinstance(each, RunSetup | TrainState) for each in (state, setup)):
        topology = Topology.create(None, join_job(find_job(), Config().parallel))
        data = arguments.check_data(data, opens=isinstance(table, str | os.PathLike))
        return measure_network(state, setup, table, loss, data, topology)
    arguments.check_evaluation(state, setup, table)
    if data is not None:
        raise InputError("data: the setup has the preprocessing already; leave it out")
    return setup.with_loss(loss or DEFAULT_LOSSES[setup.layout.training_data.labels.form]).evaluator(table)(state)


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
    arguments.check_evaluation(state, setup, table, one_label=True)
    numbers = k if isinstance(k, Iterable) and not isinstance(k, str) else [k]
    ks = [checked(number, Annotated[int, Range(1, table.num_classes)], "k") for number in numbers]
    measured = setup.changed(metrics={f"top{k}": TopK(k) for k in ks}).evaluator(table)(state)
    return {k: measured[f"top{k}"] for k in ks}


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
    file = Path(files.check_path(out, "out"))
    arrays = own_arrays(without_adapters(setup.network, state.eval_params), state.eval_model_state)
    write_weights(file, setup.model, {path: np.asarray(leaf) for path, leaf in arrays.items()}, setup.topology.peers)


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
    checked(count, Annotated[int, Range(1, 1000)], "count")
    checked(step, Annotated[int, Range(1, 10**9)], "step")
    return input_figure(setup.feed, setup.preprocess, step, count)


@errors_name_arguments()
def tf_dataset(setup: RunSetup, start: int = 0, stop: int | None = None) -> Any:
    """Return the training batches of a process as a `tf.data` pipeline, for programs that are written for it.

    Each process of a job gets its own part of each batch. The pixels, their order and the augmentation keys (`row` and
    `epoch`) are those of `train`, which needs no TensorFlow.

    Args:
        setup: the result of `prepare_training`.
        start, stop: the steps, from 0; by default all steps of the training.

    Returns:
        A `tf.data.Dataset` of dicts of NumPy arrays, as in `jaxddp.data.batch.Batch`: image [B, H, W, C], label, mask,
        row, epoch, and the other columns that the training has.

    Raises:
        InputError: an argument has the wrong type, or TensorFlow is not installed.
    """
    check_setup(setup)
    steps = range(setup.layout.plan.total_steps)[start:stop]
    batch = setup.feed.abstract_batch()._asdict()
    columns = {name: column for name, column in batch.items() if hasattr(column, "dtype")}
    return tf_data.dataset(lambda: setup.feed.read(steps), columns)


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
    arguments.check_evaluation(state, setup, table, one_label=True)
    train, config = setup.resources.train, setup.config
    if isinstance(train, UnitedSource):
        problem = ": pictures of predictions need the same images on all processes"
        raise InputError(Key.plain("data.placement", "local"), problem, advice="load the run in one process")
    checked(count, Annotated[int, Range(1, MAX_SHOWN)], "count")
    checked(explain, bool, "explain")
    # A table without labels has no classes.
    if table.class_names:
        check_comparable(table, train, config.data)
    state = state.map_params(lambda params: without_adapters(setup.network, params))
    signature, step = Signature.of(train, config.data), int(state.step)
    trained = TrainedRun(Path(), step, config, setup.model, state, setup.preprocess, signature, setup.topology)
    return trained.show(table, range(min(count, len(table))), explain=explain)


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
        The trained run, with methods for predictions, and the temperature of `jaxddp eval RUN --calibrate`.

    Raises:
        InputError: there is no such run or checkpoint, or the checkpoint is of another model.
    """
    directory = Path(files.check_path(workdir, "workdir"))
    peers = join_job(find_job(), Config().parallel)
    return calibrated(restore_run(directory, _which(step), Topology.create(devices, peers), model))


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
    directory = Path(files.check_path(workdir, "workdir"))
    file = recipe_of_run(directory)
    # The devices of the run are not part of its recipe.
    changes: dict[str, dict[str, Any]] = {"parallel": plain(Config().parallel)}
    if data is not None:
        changes["data"] = {"path": str(files.check_path(data, "data")), "name": None}
    if batch_size is not None:
        changes["eval"] = {"batch_size": batch_size}
    file = dataclasses.replace(file, config=file.config.replace(**changes))
    return evaluate_checkpoint(file, directory, _which(step))


def _which(step: str | int) -> str:
    return step if isinstance(step, str) else str(checked(step, int, "step"))


_OPENING_KEYS = ("path", "val_share", "classes", "manifest", "fold", *TABLE_KEYS)
"""The keys of `data` that are arguments of `open_data`."""


@errors_name_arguments({f"data.{key}": key for key in _OPENING_KEYS})
def open_data(
    path: str | os.PathLike[str],
    val_share: float | None = None,
    *,
    classes: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
    **table: Any,
) -> tuple[Source, Source]:
    """Open a data set: a folder with one folder per class, or any other format in docs/data.md.

    Args:
        path: a folder, a file, a URL, "hf:OWNER/NAME", "tfds:NAME", or a name in datasets.toml if there is no such
            file.
        val_share: the fraction of each class to hold out, above 0 and below 1, if the data have no validation split.
        classes: a range of classes, "0:200", or their ids, "cats,dogs". Default: the classes of the entry in
            datasets.toml, else all.
        manifest: a manifest of `jaxddp data check`. The SHA-256 of each image is compared with it on every read.
        table: `fold`, and keys that say how a table is read, as in the config: `columns`, `images`, `suffix`,
            `targets`, `weight_column`, `label_separator`, `split_column`, `val_fold`, `group_column`.

    Returns:
        The training data and the validation data.

    Raises:
        InputError: the data do not exist or are invalid, there is no validation split and no `val_share`, or the
            manifest does not list an image. This function does not open the images.
    """
    place = find_dataset(files.check_path(path, "path"))
    held_out = checked(val_share, HeldOut | None, "val_share")
    chosen = checked(classes, str | None, "classes")
    if unknown := sorted(table.keys() - {*_OPENING_KEYS}):
        raise InputError(f"open_data: unknown argument {unknown[0]!r}; {choices(unknown[0], _OPENING_KEYS)}")
    data = place.completed(DataConfig(path=place.path, val_share=held_out, classes=chosen, **table))
    if manifest is not None:
        data = dataclasses.replace(data, verify="manifest", manifest=os.fspath(files.check_path(manifest, "manifest")))
    train, val = open_full_splits(data).values()
    return train, val
