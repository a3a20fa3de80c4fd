"""The notebook's door: make a run ready, look at it, train it, and look at what came out.

setup = prepare_training(model, train_table, None, optax.sgd(0.1, momentum=0.9), 32, epochs=5)
state, history = train(softmax_cross_entropy, setup, val=val_table)
history
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.augment.preprocess import Augmentation
from jaxddp.config import AugmentConfig, BatchSize, Config, DataConfig, ModelConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.data.formats.ilsvrc import test_listing, train_solutions, val_solutions
from jaxddp.data.source import Source, check_labelled
from jaxddp.data.table import ExampleTable
from jaxddp.duration import Duration
from jaxddp.engine.compiler_options import step_options
from jaxddp.engine.loss import Loss, example_loss
from jaxddp.engine.objective import Metric
from jaxddp.engine.parts.part import Part
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.engine.state import TrainState, Transform
from jaxddp.engine.step import make_predict
from jaxddp.errors import InputError
from jaxddp.experiment.recipe import Recipe, check_listeners, check_metrics, check_optimizer, configured_metrics
from jaxddp.experiment.resources import Resources
from jaxddp.experiment.resume import Claim, claim
from jaxddp.experiment.session import session
from jaxddp.experiment.setup import RunSetup, prepare
from jaxddp.job.environment import find_job
from jaxddp.job.membership import agree, join
from jaxddp.losses.cross_entropy import cross_entropy
from jaxddp.mesh import Device, Topology
from jaxddp.metrics.top_k import TopK
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import ResNet, build
from jaxddp.overrides import checked, flatten, plain
from jaxddp.ranges import Range
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.training.events import Listener
from jaxddp.training.listeners.display import progress
from jaxddp.training.listeners.history import History
from jaxddp.training.listeners.jsonl import JsonLines
from jaxddp.training.loop import fit
from jaxddp.wording import choices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

_Epochs = Annotated[float, Range(0, 10**9, above=True)]

softmax_cross_entropy = cross_entropy()
"""The usual loss: (logits float[B, K], labels int32[B]) -> float[B]."""


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
        InputError: an unknown name or option; says the nearest right one.
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
    xla_options: Sequence[str] = (),
    gradient_precision: str | None = None,
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
        initialize: a transform of the fresh (params, model_state), such as pretrained weights; see `create_state`.
        parts: optional pieces of the step, see `jaxddp.engine.parts.part.Part`.
        xla_options: for the compiled step, as NAME=VALUE; `jaxddp.engine.compiler_options` has some to try.
        gradient_precision: "bfloat16" halves what travels between devices, and rounds it; None sends it as it is.

    Returns:
        A `RunSetup`; printed, it shows which slice of a batch each device gets. Its `with_seed` has another seed.

    Raises:
        InputError: names the argument, its value, and what would do.
    """
    check_labelled(table, "training data")
    checked(batch_size_per_device, BatchSize, "batch_size_per_device")
    checked(epochs, _Epochs, "epochs")
    join(find_job())
    keep_compiled_programs()
    topology = Topology.create(devices)
    numbers = {"batch_size": batch_size_per_device * topology.num_devices, "duration": f"{epochs} epochs"}
    numbers |= {"precision": "float32", "gradient_precision": gradient_precision}
    config = Config().replace(seed=seed, train=numbers, parallel={"xla_options": tuple(xla_options)})
    loss, classes = example_loss(softmax_cross_entropy, table.num_classes), table.num_classes
    recipe = Recipe(
        config=dataclasses.replace(config, data=data or table.default_data()),
        model=adapt(model),
        optimizer=check_optimizer(optimizer, "optimizer"),
        loss=loss,
        eval_loss=loss,
        metrics=configured_metrics(config, classes) | check_metrics(metrics or {}, "metrics", classes),
        augmentation=augmentation,
        parts=tuple(parts),
        initialize=initialize,
    )
    return prepare(recipe, Resources(topology, table, compiler_options=step_options(config, topology)))


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
    log_every: str = "10 steps",
    eval_every: str = "1 epoch",
    save_every: str = "1 epoch",
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
        log_every, eval_every, save_every: durations: "50 steps", "1 epoch", "10%".
        profile: a duration, soon after the first step, of which a trace for TensorBoard goes into workdir/profile/.

    Returns:
        The trained state, and a history that draws itself in a notebook.

    Raises:
        InputError, NonFiniteError, Preempted: see `jaxddp.errors`.
    """
    if profile and workdir is None:
        raise InputError(f"profile={profile!r}: a trace is written into the work directory; give workdir too")
    log, save, evaluate = (
        {"every": checked(value, Duration, name)}
        for name, value in (("log_every", log_every), ("save_every", save_every), ("eval_every", eval_every))
    )
    log["profile"] = checked(profile, Duration | None, "profile")
    changes = {"log": log, "checkpoint": save, "eval": evaluate | {"batch_size": setup.order.batch_size}}
    if epochs is not None:
        changes["train"] = {"duration": f"{checked(epochs, _Epochs, 'epochs')} epochs"}
    setup = setup.with_loss(loss)
    recipe = dataclasses.replace(setup.recipe, config=setup.recipe.config.replace(**changes), schedule=schedule)
    resources = dataclasses.replace(setup.resources, val=val)
    # The step consumes the state that it is given, and the setup's is to be used again.
    state = jax.tree.map(jnp.copy, setup.state)
    setup = dataclasses.replace(setup, recipe=recipe, resources=resources, state=state)
    history = History()
    watching = [*([progress()] if listeners is None else check_listeners(listeners, "listeners")), history]
    given = {"workdir": workdir is not None, "schedule": schedule is not None, "evaluators": len(evaluators)}
    agree({name: str(value) for name, value in (_told(setup) | given).items()})
    if workdir is None:
        objects = setup.identity() if setup.topology.process_count > 1 else None
        return fit(setup.run(listeners=watching, evaluators=evaluators, objects=objects)), history
    with session(Path(workdir)) as own:
        # Once there was no config.json.
        known = own.resume_step is not None and (own.directory / CONFIG_FILE).exists()
        claimed = _claim(setup)
        claim(own.directory, claimed, resuming=known)
        watching.append(JsonLines(own.directory))
        return fit(setup.run(own, listeners=watching, evaluators=evaluators, objects=claimed.objects)), history


def _told(setup: RunSetup) -> dict[str, Any]:
    """What decides the numbers of a run, and when processes meet: told differently, one would wait for another."""
    config, val = setup.recipe.config, setup.resources.val
    told = flatten({"data": plain(config.data), "train": plain(config.train)})
    told |= {"log_every": config.log.every, "eval_every": config.eval.every, "save_every": config.checkpoint.every}
    return told | {"val": None if val is None else val.fingerprint, "metrics": list(setup.recipe.metrics)}


def _claim(setup: RunSetup) -> Claim:
    """What is known of a run whose model, loss and optimizer are objects."""
    told, numbers = setup.recipe.config.to_dict(), ("batch_size", "duration", "gradient_precision")
    config = {"seed": told["seed"], "data": told["data"], "train": {key: told["train"][key] for key in numbers}}
    return Claim(config, {"train": setup.table.fingerprint}, objects=setup.identity())


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
    return prediction_grid(images, labels, probabilities, table.class_names or setup.table.class_names)
