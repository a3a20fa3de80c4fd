"""The notebook's door: make a run ready, look at it, train it, and look at what came out.

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
from jaxddp.core.errors import InputError
from jaxddp.core.files import check_path
from jaxddp.core.wording import choices
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.example_set import labels_of
from jaxddp.data.formats.ilsvrc import test_listing, train_solutions, val_solutions
from jaxddp.data.sample import write_sample
from jaxddp.data.source import Source, check_labelled, check_source
from jaxddp.data.table import ExampleTable
from jaxddp.engine.compiler_options import step_options
from jaxddp.engine.example_loss import Loss
from jaxddp.engine.initial_state import Transform
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState
from jaxddp.engine.step_objective import Metric
from jaxddp.inference.exported_program import export_program
from jaxddp.inference.trained import TrainedRun
from jaxddp.job.environment import find_job
from jaxddp.losses.bce import sigmoid_cross_entropy
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.mesh import Device, Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import ResNet, ResNetSettings, build
from jaxddp.notebook.argument_checks import check_data, check_evaluators, check_length, check_schedule, check_unlabelled
from jaxddp.notebook.arguments import (
    Epochs,
    changes_of_cadences,
    check_written,
    config_of_options,
    loggers_of,
    options_of,
    told_to_loggers,
    words_of_arguments,
)
from jaxddp.notebook.figures import show_inputs, show_predictions
from jaxddp.notebook.open_data import open_data
from jaxddp.notebook.results import evaluate, export_weights, topk_accuracy
from jaxddp.notebook.saved_runs import evaluate_run, load_run
from jaxddp.objectives.distillation import distillation
from jaxddp.overrides import checked, replaced
from jaxddp.recipe.layout import Layout, TrainingData
from jaxddp.recipe.make_recipe import make_recipe
from jaxddp.recipe.object_checks import check_listeners
from jaxddp.recipe.user_objects import objects_of_arguments
from jaxddp.setup.joining import join_job
from jaxddp.setup.prepare import prepare
from jaxddp.setup.resources import Resources
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.state_checks import check_setup
from jaxddp.tasks.run_training import train_setup
from jaxddp.training.events import Listener
from jaxddp.training.listeners.history import History
from jaxddp.training.progress.display import progress
from jaxddp.training.validation.evaluator import Measure
from jaxddp.workdir.digests import told

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


@words_of_arguments()
def resnet(
    name: str, num_classes: int, *, dtype: Any = "float32", param_dtype: Any = "float32", **options: Any
) -> ResNet:
    """A ResNet by name: "resnet10", "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".

    Args:
        num_classes: number of logits.
        dtype: of the computation; "bfloat16" is the faster one on a GPU. Parameters stay in `param_dtype`.
        options: the other keys of a config's `model`, see `jaxddp.config.ModelConfig`: `width`, `stem` ("imagenet" or
            "small", for images of about 32 pixels), `batch_norm` ("local", "sync", or "ghost:32", for which each
            device's batch must be a multiple of 32), `zero_init_last_scale`, `shortcut_norm`, `weight_init`,
            `blur_pool`.

    Raises:
        InputError: an unknown name, option or dtype; says the nearest right one.
    """
    own = [field.name for field in dataclasses.fields(ResNetSettings)]
    for key in options.keys() - {*own}:
        if key in options_of("model"):
            raise InputError(f"resnet: {key} is an option of prepare_training; give it there")
        raise InputError(f"resnet: unknown option {key!r}; {choices(key, own)}")
    settings = replaced(ModelConfig(), {"name": name, **options})
    return build(settings, checked(num_classes, int, "num_classes"), dtype, param_dtype)


@words_of_arguments()
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
    """Lay a model, its data and its optimizer out over the devices.

    In a script that a launcher started, this also joins the job: call it before anything else asks JAX for its devices.
    What is compiled from here on is kept for the next start, unless `JAX_ENABLE_COMPILATION_CACHE` is false.

    Args:
        model: a Linen or an NNX module, or a pair of functions (init, apply); see `jaxddp.models.adapt.adapt`.
        table: from `open_data`, an `ArrayTable` of images in memory, or any other `jaxddp.data.source.Source`.
        devices: how many of this job's devices, or which; None for all.
        optimizer: any optax optimizer.
        batch_size_per_device: of the global batch, each device's share.
        epochs: how long `train` trains.
        data: how images become input (sizes, crops, augmentation, normalization, cache). The default normalizes arrays
            as they are, and takes files through random-area crops and flips to 224 pixels.
        metrics: measured beside loss, top-1 and top-5: functions of (logits float[B, K], labels int32[B]) -> float[B].
        augmentation: a function of (key, image float32[H, W, C]) on the device, after those of `data`.
        initialize: a transform of the fresh (params, model_state), before any weights; see `make_init`.
        parts: optional pieces of the step, see `jaxddp.engine.parts.part.Part`.
        objective: "fixmatch", "distillation", or a function of the supervised objective, such as `distillation(run)`;
            see `jaxddp.engine.step_objective`.
        unlabelled: a second source, whose labels are not looked at, for objectives that take one.
        options: further keys of a config by their names alone, such as `accumulate=4`: those of `train`, `checkpoint`,
            `parallel`, `model` and `optimizer` that docs/extending.md lists; see `jaxddp.config`. `precision` is that
            of the input; the network has its own, and "float16" scales the loss.

    Returns:
        A `RunSetup`; printed, it shows which slice of a batch each device gets. Its `with_seed` has another seed.

    Raises:
        InputError: names the argument, its value, and what would do.
    """
    check_labelled(check_source(table, "table"), "training data")
    per_device = checked(batch_size_per_device, BatchSize, "batch_size_per_device")
    length = {"duration": f"{checked(epochs, Epochs, 'epochs')} epochs"}
    named = inspect.signature(prepare_training).parameters.keys() - {"options"}
    config = config_of_options({"precision": "float32"} | options, objective, seed, named)
    config = dataclasses.replace(config, data=check_data(data) or table.default_data())
    topology = Topology.create(devices, join_job(find_job(), config.parallel))
    config = config.replace(train={"batch_size": per_device * topology.num_devices, **length})
    objects = {"model": model, "optimizer": optimizer, "initialize": initialize, "augmentation": augmentation}
    objects |= {"metrics": metrics, "parts": parts}
    if not isinstance(objective, str):
        objects["objective"] = objective
    # Until `train` is given another.
    objects["loss"] = softmax_cross_entropy
    if labels_of(table).several:
        config, objects["loss"] = config.replace(eval={"metrics": ("map",)}), sigmoid_cross_entropy
    resources = Resources(topology, table, None, step_options(config, topology), check_unlabelled(unlabelled))
    layout = Layout.of(config, topology, TrainingData.of(table, config.data))
    return prepare(make_recipe(config, layout, topology, objects_of_arguments(**objects)), resources, layout)


@words_of_arguments()
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
    """Train a setup for its epochs. The setup stays as it was: training it, or its `with_seed`, compiles nothing anew.

    Args:
        loss: of (logits, labels), the loss of each example, their mean, or (sum, weight); see
            `jaxddp.engine.example_loss`.
        val: measured each `eval_every` and at the end.
        schedule: multiplies the optimizer's updates, as a function of the step (0 first).
        epochs: how long, from step 0 on; the setup's where absent. A setup with a trained state goes on from its step.
        listeners: each a `jaxddp.training.events.Listener`. A live progress display where absent; () is silent.
        evaluators: functions of the state to a dict of numbers, which join each evaluation's. With an average they are
            called for it, too: `params` and `eval_params` of their state are what is measured.
        workdir: where checkpoints and metrics.jsonl go; a run that was interrupted there is resumed, one that is done
            returned as it is (and measured, if it was not). A run with another model, loss, optimizer or data is
            refused there. With it, SIGTERM makes the run save and stop.
        log_to: loggers beside metrics.jsonl, by their names in a config's `log.to`; there must be a workdir for them.
        log_project, log_name, log_config: what "wandb" and "mlflow" are told, as a config's `log` has it; a dict.
        log_every, eval_every, save_every: durations: "50 steps", "1 epoch", "10%".
        check_every: as well as before each save, see that all devices hold the same state; "0 steps" never does.
        self_test: "auto", "always" or "never": compare the averaged gradient with one device's before the first step.
        profile: a duration, soon after the first step, of which a trace for TensorBoard goes into workdir/profile/.

    Returns:
        The trained state, and a history that draws itself in a notebook: the same on every process.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.core.errors`.
    """
    check_setup(setup)
    check_written(workdir, profile, log_to)
    often = {"log_every": log_every, "eval_every": eval_every, "save_every": save_every, "check_every": check_every}
    changes = changes_of_cadences(**often, self_test=self_test, profile=profile)
    changes["eval"]["batch_size"] = setup.order.batch_size
    changes["log"] |= {"to": loggers_of(log_to)} | told_to_loggers(log_project, log_name, log_config)
    if epochs is not None:
        changes["train"] = {"duration": f"{checked(epochs, Epochs, 'epochs')} epochs"}
        check_length(setup.recipe.config, setup.recipe.config.replace(**changes))
    setup = setup.with_loss(loss)
    resources = dataclasses.replace(setup.resources, val=val if val is None else check_source(val, "val"))
    config = setup.recipe.config.replace(**changes)
    setup = setup.changed(resources=resources, config=config, schedule=check_schedule(schedule))
    history, measures = History(), check_evaluators(evaluators, setup)
    watching = [*([progress()] if listeners is None else check_listeners(listeners, "listeners")), history]
    directory = None if workdir is None else Path(check_path(workdir, "workdir")).absolute()
    given = {"workdir": workdir is not None, "schedule": schedule is not None, "evaluators": len(measures)}
    setup.topology.peers.agree({name: str(value) for name, value in (told(setup.recipe, val) | given).items()})
    state = train_setup(setup, directory, watching, measures)
    history.share(setup.topology)
    return state, history
