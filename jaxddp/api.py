"""The notebook's door: make a run ready, look at it, train it, and look at what came out.

setup = prepare_training(model, train_table, None, optax.sgd(0.1, momentum=0.9), 32, epochs=5)
state, history = train(softmax_cross_entropy, setup, val=val_table)
history
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.augment.preprocess import Augmentation
from jaxddp.config import AugmentConfig, BatchSize, Config, DataConfig, ModelConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.formats.ilsvrc import test_listing, train_solutions, val_solutions
from jaxddp.data.source import Source, check_labelled
from jaxddp.data.table import ExampleTable
from jaxddp.engine.compiler_options import step_options
from jaxddp.engine.loss import Loss, example_loss
from jaxddp.engine.objective import Metric
from jaxddp.engine.parts.part import Part
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.engine.state import TrainState, Transform
from jaxddp.errors import InputError
from jaxddp.experiment.arguments import Epochs, cadences, check_written, loggers, sections
from jaxddp.experiment.exported_weights import export_weights
from jaxddp.experiment.fine_tuning import check_thaw
from jaxddp.experiment.identity import told
from jaxddp.experiment.prepare import prepare
from jaxddp.experiment.recipe import (
    Recipe,
    check_listeners,
    check_metrics,
    check_optimizer,
    check_parts,
    configured_metrics,
    configured_parts,
)
from jaxddp.experiment.resources import Resources
from jaxddp.experiment.results import evaluate, show_predictions, topk_accuracy
from jaxddp.experiment.resume import claim, claim_of
from jaxddp.experiment.session import session
from jaxddp.experiment.setup import RunSetup
from jaxddp.job.environment import find_job
from jaxddp.job.membership import agree, join
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.mesh import Device, Topology, fix_cpu_threads
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import ResNet, build
from jaxddp.overrides import checked
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.training.events import Listener
from jaxddp.training.listeners.display import progress
from jaxddp.training.listeners.history import History
from jaxddp.training.loggers import make_loggers
from jaxddp.training.loop import fit
from jaxddp.wording import choices

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
    "adapt",
    "evaluate",
    "export_weights",
    "prepare_training",
    "resnet",
    "show_predictions",
    "softmax_cross_entropy",
    "test_listing",
    "topk_accuracy",
    "train",
    "train_solutions",
    "val_solutions",
]


def resnet(
    name: str, num_classes: int, *, dtype: Any = "float32", param_dtype: Any = "float32", **options: Any
) -> ResNet:
    """A ResNet by name: "resnet10", "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".

    Args:
        num_classes: number of logits.
        dtype: of the computation; "bfloat16" is the faster one on a GPU. Parameters stay in `param_dtype`.
        options: the other keys of a config's `model`, see `jaxddp.config.ModelConfig`: `width`, `stem` ("imagenet" or
            "small", for images of about 32 pixels), `batch_norm` ("local", "sync", or "ghost:32", for which each
            device's batch must be a multiple of 32), `zero_init_last_scale`, `weight_init`.

    Raises:
        InputError: an unknown name, option or dtype; says the nearest right one.
    """
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    for key in options.keys() - known:
        raise InputError(f"resnet: unknown option {key!r}; {choices(key, known)}")
    return build(ModelConfig(name, **options), num_classes, dtype, param_dtype)


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
    **options: Any,
) -> RunSetup:
    """Lay a model, its data and its optimizer out over the devices.

    In a script that a launcher started, this also joins the job's processes: call it before anything else asks JAX for
    its devices. What is compiled from here on is kept for the next start, unless JAX is set otherwise
    (`JAX_ENABLE_COMPILATION_CACHE=false`).

    Args:
        model: a Linen or an NNX module, or a pair of functions (init, apply); see `jaxddp.models.adapt.adapt`. It need
            not know of devices or axes.
        table: from `train_solutions`, an `ArrayTable` of images in memory, or anything else with the members of
            `jaxddp.data.source.Source`.
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
        options: `accumulate`, `precision` (of the input; the network has its own, and "float16" scales the loss),
            `gradient_precision` and `max_bad_steps` of a config's `train`; `reproducible`, `buckets` and `xla_options`
            of its `parallel`; `weights`, `new_layers`, `freeze` and `unfreeze` of its `model`; `layer_decay` and
            `rate_factors` of its `optimizer`. See `jaxddp.config`.

    Returns:
        A `RunSetup`; printed, it shows which slice of a batch each device gets. Its `with_seed` has another seed.

    Raises:
        InputError: names the argument, its value, and what would do.
    """
    check_labelled(table, "training data")
    checked(batch_size_per_device, BatchSize, "batch_size_per_device")
    checked(epochs, Epochs, "epochs")
    _join(reproducible=bool(options.get("reproducible")))
    topology = Topology.create(devices)
    numbers = {"batch_size": batch_size_per_device * topology.num_devices, "duration": f"{epochs} epochs"}
    config = Config().replace(seed=seed, **sections({"precision": "float32"} | options, numbers))
    loss, classes = example_loss(softmax_cross_entropy, table.num_classes), table.num_classes
    recipe = Recipe(
        config=dataclasses.replace(config, data=data or table.default_data()),
        model=adapt(model),
        optimizer=check_optimizer(optimizer, "optimizer"),
        loss=loss,
        eval_loss=loss,
        metrics=configured_metrics(config, classes) | check_metrics(metrics or {}, "metrics", classes),
        augmentation=augmentation,
        parts=check_parts(parts, "parts", configured_parts(config)),
        initialize=initialize,
    )
    return prepare(recipe, Resources(topology, table, compiler_options=step_options(config, topology)))


def _join(*, reproducible: bool) -> None:
    """Join the job of the environment; what is compiled from here on is kept for the next start."""
    if reproducible:
        fix_cpu_threads()
    join(find_job())
    keep_compiled_programs()


def train(
    loss: Loss,
    setup: RunSetup,
    *,
    val: Source | None = None,
    schedule: optax.Schedule | None = None,
    epochs: float | None = None,
    listeners: Sequence[Any] | None = None,
    evaluators: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
    workdir: str | Path | None = None,
    log_to: str | Sequence[str] = (),
    log_every: str = "10 steps",
    eval_every: str = "1 epoch",
    save_every: str = "1 epoch",
    check_every: str = "1000 steps",
    self_test: str = "auto",
    profile: str | None = None,
) -> tuple[TrainState, History]:
    """Train a setup for its epochs. The setup stays as it was: training it, or its `with_seed`, compiles nothing anew.

    Args:
        loss: a function of (logits, labels) that returns the loss of each example, their mean, or a pair (sum, weight);
            see `jaxddp.engine.loss`.
        val: measured each `eval_every` and at the end.
        schedule: multiplies the optimizer's updates, as a function of the step (0 first).
        epochs: how long, from step 0 on; the setup's where absent. A setup with a trained state goes on from its step.
        listeners: objects with any of the methods of `jaxddp.training.events.Listener`. A live progress display where
            absent; () watches in silence.
        evaluators: functions of the state, whose metrics join each evaluation's.
        workdir: where checkpoints and metrics.jsonl go; a run that was interrupted there is resumed, one that is done
            returned as it is (and measured, if it was not). A run with another model, loss, optimizer or data is
            refused there. With it, SIGTERM makes the run save and stop.
        log_to: loggers beside metrics.jsonl, by their names in a config's `log.to`; there must be a workdir for them.
        log_every, eval_every, save_every: durations: "50 steps", "1 epoch", "10%".
        check_every: as well as before each save, see that all devices hold the same state; "0 steps" never does.
        self_test: "auto", "always" or "never": compare the averaged gradient with one device's before the first step.
        profile: a duration, soon after the first step, of which a trace for TensorBoard goes into workdir/profile/.

    Returns:
        The trained state, and a history that draws itself in a notebook.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.errors`.
    """
    check_written(workdir, profile, log_to)
    changes = cadences(log_every, save_every, eval_every, check_every, profile, self_test)
    changes["eval"]["batch_size"], changes["log"]["to"] = setup.order.batch_size, loggers(log_to)
    if epochs is not None:
        changes["train"] = {"duration": f"{checked(epochs, Epochs, 'epochs')} epochs"}
        check_thaw(setup.recipe.config, setup.recipe.config.replace(**changes))
    setup = setup.with_loss(loss)
    recipe = dataclasses.replace(setup.recipe, config=setup.recipe.config.replace(**changes), schedule=schedule)
    resources = dataclasses.replace(setup.resources, val=val)
    # The step consumes the state that it is given, and the setup's is to be used again.
    setup = dataclasses.replace(setup, recipe=recipe, resources=resources, state=jax.tree.map(jnp.copy, setup.state))
    history = History()
    watching = [*([progress()] if listeners is None else check_listeners(listeners, "listeners")), history]
    given = {"workdir": workdir is not None, "schedule": schedule is not None, "evaluators": len(evaluators)}
    agree({name: str(value) for name, value in (told(setup.recipe, val) | given).items()})
    compared = workdir is not None or setup.topology.process_count > 1
    claimed = claim_of(setup, setup.identity() if compared else {})
    watching += [] if workdir is None else make_loggers(setup.recipe.config, Path(workdir))
    with nullcontext() if workdir is None else session(Path(workdir)) as own:
        if own is not None:
            # Once there was no config.json.
            known = own.resume_step is not None and (own.directory / CONFIG_FILE).exists()
            claim(own.directory, claimed, resuming=known)
        told_of_it = {"objects": claimed.objects, "config": claimed.content()}
        return fit(setup.run(own, listeners=watching, evaluators=evaluators, **told_of_it)), history
