"""Public Python API: prepare a training, inspect it, run it, and show the results.

setup = prepare_training(model, train_table, None, optax.sgd(0.1, momentum=0.9), 32, epochs=5)
state, history = train(softmax_cross_entropy, setup, val=val_table)
history
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

from jaxddp.augment.preprocess import Augmentation
from jaxddp.config import AugmentConfig, BatchSize, Config, DataConfig, ModelConfig
from jaxddp.config.values import checked, replaced
from jaxddp.core.errors import InputError, choices
from jaxddp.core.files import check_path
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.formats.ilsvrc import test_listing, train_solutions, val_solutions
from jaxddp.data.sample import write_sample
from jaxddp.data.source import Source, check_labelled, check_source, labels_of
from jaxddp.data.table import ExampleTable
from jaxddp.engine.initial_state import Transform
from jaxddp.engine.objective import Loss, Metric
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState
from jaxddp.inference.exports import export_program
from jaxddp.inference.trained import TrainedRun
from jaxddp.job.environment import find_job
from jaxddp.losses import sigmoid_cross_entropy, softmax_cross_entropy
from jaxddp.mesh import Device, Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.families import ResNetSettings
from jaxddp.models.resnet import ResNet, build
from jaxddp.notebook.results import (
    OPTIONS,
    Epochs,
    check_data,
    check_evaluators,
    check_length,
    check_schedule,
    check_unlabelled,
    check_workdir_for,
    config_of_options,
    errors_name_arguments,
    evaluate,
    evaluate_run,
    export_weights,
    load_run,
    log_settings,
    open_data,
    show_inputs,
    show_predictions,
    topk_accuracy,
)
from jaxddp.objectives.distillation import distillation
from jaxddp.setup.identity import shared_settings
from jaxddp.setup.recipe import make_recipe
from jaxddp.setup.resources import join_job, resources_of
from jaxddp.setup.run_setup import RunSetup, check_setup
from jaxddp.setup.run_setup import initialize as initialize_network
from jaxddp.setup.run_training import train as train_run
from jaxddp.setup.user_objects import check_listeners, objects_of_arguments
from jaxddp.training.evaluation import Measure
from jaxddp.training.events import Listener
from jaxddp.training.listeners.history import History
from jaxddp.training.progress import progress

__all__ = [
    "ArrayTable",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "ExampleTable",
    "History",
    "InputError",
    "Listener",
    "RunSetup",
    "TrainedRun",
    "adapt",
    "distillation",
    "evaluate",
    "evaluate_run",
    "export_program",
    "export_weights",
    "load_run",
    "open_data",
    "prepare_training",
    "resnet",
    "show_inputs",
    "show_predictions",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "test_listing",
    "topk_accuracy",
    "train",
    "train_solutions",
    "val_solutions",
    "write_sample",
]


@errors_name_arguments()
def resnet(
    name: str, num_classes: int, *, dtype: Any = "float32", param_dtype: Any = "float32", **options: Any
) -> ResNet:
    """Return a ResNet by name: "resnet10", "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".

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
    for key in options.keys() - {*known}:
        if OPTIONS.get(key, "").startswith("model."):
            raise InputError(f"resnet: {key} is an option of prepare_training; give it there")
        raise InputError(f"resnet: unknown option {key!r}; {choices(key, known)}")
    settings = replaced(ModelConfig(), {"name": name, **options})
    return build(settings, checked(num_classes, int, "num_classes"), dtype, param_dtype)


@errors_name_arguments()
def prepare_training(
    model: Any,
    table: Source,
    devices: int | Sequence[Device] | None,
    optimizer: optax.GradientTransformation,
    batch_size_per_device: int,
    *,
    epochs: float = 1,
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
        epochs: length of the training.
        data: the preprocessing of images. By default, arrays are only normalized, and files get random-area
            crops of 224 pixels and horizontal flips.
        seed: seed of the initial parameters, the order of examples, augmentation and dropout.
        metrics: metrics besides the loss, top-1 and top-5: functions (logits float[B, K], labels int32[B]) -> float[B].
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
    length = {"duration": f"{checked(epochs, Epochs, 'epochs')} epochs"}
    arguments = inspect.signature(prepare_training).parameters.keys() - {"options"}
    config = config_of_options({"precision": "float32"} | options, objective, seed, arguments)
    config = dataclasses.replace(config, data=check_data(data) or table.default_data())
    topology = Topology.create(devices, join_job(find_job(), config.parallel))
    config = config.replace(train={"batch_size": per_device * topology.num_devices, **length})
    objects = {"model": model, "optimizer": optimizer, "initialize": initialize, "augmentation": augmentation}
    # `train` may replace this loss.
    objects |= {"metrics": metrics, "parts": parts, "loss": softmax_cross_entropy}
    if not isinstance(objective, str):
        objects["objective"] = objective
    if labels_of(table).several:
        config, objects["loss"] = config.replace(eval={"metrics": ("map",)}), sigmoid_cross_entropy
    resources = resources_of(config, topology, table, check_unlabelled(unlabelled))
    recipe = make_recipe(
        config, topology, resources, objects_of_arguments(**objects), precision=options.get("precision")
    )
    return initialize_network(recipe)


@errors_name_arguments()
def train(
    loss: Loss,
    setup: RunSetup,
    *,
    val: Source | None = None,
    schedule: optax.Schedule | None = None,
    epochs: float | None = None,
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
        listeners: see `jaxddp.training.events.Listener`. Default: a live progress display; () shows nothing.
        evaluators: functions of a state that return a dict of further metrics. They also get the averaged parameters.
        workdir: folder of checkpoints and metrics.jsonl. An interrupted run is resumed there; an ended run is
            only returned. Another model, loss, optimizer or data is an error. SIGTERM makes the run save and stop.
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
    """
    check_setup(setup)
    check_workdir_for(workdir, profile, log_to)
    changes: dict[str, dict[str, Any]] = {
        "log": {"every": log_every, "profile": profile, **log_settings(log_to, log_project, log_name, log_config)},
        "eval": {"every": eval_every, "batch_size": setup.feed.order.batch_size},
        "checkpoint": {"every": save_every},
        "parallel": {"check_replicas": check_every, "self_test": self_test},
    }
    if epochs is not None:
        changes["train"] = {"duration": f"{checked(epochs, Epochs, 'epochs')} epochs"}
        check_length(setup.config, setup.config.replace(**changes))
    setup = setup.with_loss(loss)
    source = val if val is None else check_source(val, "val")
    resources = setup.resources.with_val(source, setup.config.data, setup.topology.peers)
    config = setup.config.replace(**changes)
    setup = setup.changed(resources=resources, config=config, schedule=check_schedule(schedule))
    history, measures = History(), check_evaluators(evaluators, setup)
    all_listeners = [*([progress()] if listeners is None else check_listeners(listeners, "listeners")), history]
    directory = None if workdir is None else Path(check_path(workdir, "workdir")).absolute()
    given = {"workdir": workdir is not None, "schedule": schedule is not None, "evaluators": len(measures)}
    setup.topology.peers.agree(shared_settings(setup, **given))
    state = train_run(setup, directory, listeners=all_listeners, evaluators=measures)
    assert state is not None  # A setup that has ended is restored.
    history.share(setup.topology)
    return state, history
