"""The notebook's door: make a run ready, look at it, train it, and look at what came out.

setup = prepare_training(model, train_table, None, optax.sgd(0.1, momentum=0.9), 32, epochs=5)
state, history = train(softmax_cross_entropy, setup, val=val_table)
history
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxddp.files as files
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.data.formats.ilsvrc import test_listing, train_solutions, val_solutions
from jaxddp.data.opening import Table
from jaxddp.data.order import SampleOrder
from jaxddp.data.table import ExampleTable
from jaxddp.engine.compiler_options import compiler_options
from jaxddp.engine.objective import Loss, cross_entropy, top_k
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import make_predict
from jaxddp.errors import InputError
from jaxddp.experiment.resume import CONFIG_FILE, check_shared, claim, held, latest_step
from jaxddp.experiment.setup import RunSetup, prepare
from jaxddp.experiment.setup import train as train_setup
from jaxddp.job.environment import find_job
from jaxddp.job.membership import join
from jaxddp.job.preemption import stop_on_sigterm
from jaxddp.measure.profile import FOLDER
from jaxddp.mesh import Device, Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import resnet
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.events import Listener
from jaxddp.training.listeners.display import progress
from jaxddp.training.listeners.history import History
from jaxddp.training.listeners.jsonl import JsonLines
from jaxddp.training.plan import Plan

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

softmax_cross_entropy = cross_entropy()
"""The usual loss: (logits float[B, K], labels int32[B]) -> float[B]."""


def prepare_training(
    model: Any,
    table: Table,
    devices: int | Sequence[Device] | None,
    optimizer: optax.GradientTransformation,
    batch_size_per_device: int,
    *,
    epochs: float = 1,
    data: DataConfig | None = None,
    seed: int = 0,
    xla_options: Sequence[str] = (),
) -> RunSetup:
    """Lay a model, its data and its optimizer out over the devices.

    In a script that a launcher started, this also joins the job's processes: call it before anything else asks JAX for
    its devices. What is compiled from here on is kept for the next start, unless JAX is set otherwise
    (`JAX_ENABLE_COMPILATION_CACHE=false`).

    Args:
        model: a Linen or an NNX module, or a pair of functions (init, apply); see `jaxddp.models.adapt.adapt`. It need
            not know of devices or axes.
        table: from `train_solutions`, or an `ArrayTable` of images in memory.
        devices: how many of this job's devices, or which; None for all.
        optimizer: any optax optimizer.
        batch_size_per_device: of the global batch, each device's share.
        epochs: how long `train` trains.
        data: how images become input (sizes, crops, augmentation, normalization), and whether the training set is kept
            on the devices (`cache="device"`). The default leaves arrays as they are but for normalizing, and takes
            files through random-area crops and flips to 224 pixels.
        xla_options: for the compiled step, as NAME=VALUE; `jaxddp.engine.compiler_options` has some to try.

    Returns:
        A `RunSetup`; printed, it shows which slice of a batch each device gets.

    Raises:
        InputError: names the argument, its value, and what would do.
    """
    join(find_job())
    keep_compiled_programs()
    topology = Topology.create(devices)
    data = data or DataConfig(augment=AugmentConfig(flip=not hasattr(table, "images")))
    order = SampleOrder(len(table), batch_size_per_device * topology.num_devices, seed)
    options = compiler_options(xla_options)
    return prepare(model, table, optimizer, topology, order, data=data, epochs=epochs, compiler_options=options)


def train(
    loss: Loss,
    setup: RunSetup,
    *,
    val: Table | None = None,
    schedule: optax.Schedule | None = None,
    listeners: Sequence[Listener] | None = None,
    evaluators: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
    workdir: str | Path | None = None,
    log_every: str = "10 steps",
    eval_every: str = "1 epoch",
    save_every: str = "1 epoch",
    profile: str | None = None,
) -> tuple[TrainState, History]:
    """Train a setup for its epochs. The setup stays as it was: training it again repeats the run.

    Args:
        loss: any function of (logits, labels), of each example or averaged over them.
        val: measured each `eval_every` and at the end.
        schedule: multiplies the optimizer's updates, as a function of the step (0 first).
        listeners: told of the start, logged steps, evaluations and the end; see `jaxddp.training.events.Listener`. A
            live progress display where absent; () watches in silence.
        evaluators: functions of the state, whose figures join each evaluation's.
        workdir: where checkpoints and metrics.jsonl go; a run that was interrupted there is resumed, one that is done
            returned as it is (and measured, if it was not). With it, SIGTERM makes the run save and stop.
        log_every, eval_every, save_every: durations: "50 steps", "1 epoch", "10%".
        profile: a duration, from a few steps after the first on, of which a trace for TensorBoard goes into the work
            directory's profile/.

    Returns:
        The trained state, and a history that draws itself in a notebook.

    Raises:
        InputError, NonFiniteError, Preempted: see `jaxddp.errors`.
    """
    config = Config().replace(
        train={"batch_size": setup.order.batch_size, "duration": f"{setup.epochs} epochs"},
        log={"every": log_every, "profile": profile},
        eval={"every": eval_every},
        checkpoint={"every": save_every},
    )
    if profile and workdir is None:
        raise InputError(f"profile={profile!r}: a trace is written into the work directory; give workdir too")
    history = History()
    objective = setup.objective(loss)
    evaluator = None if val is None else setup.evaluator(objective, val, extra=evaluators)
    # The step consumes the state that it is given, and the setup's is to be used again.
    again = dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))
    settings = {"evaluator": evaluator, "schedule": schedule}
    plan = Plan.of(dataclasses.replace(config, data=setup.data), len(setup.table))
    watching = [*([progress()] if listeners is None else listeners), history]
    if workdir is None:
        return train_setup(again, objective, plan, listeners=watching, **settings), history
    directory = files.create(Path(workdir))
    check_shared(directory)
    with held(directory), Checkpoints(directory / "checkpoints") as checkpoints, stop_on_sigterm() as stop:
        step = latest_step(checkpoints)
        # Once there was none.
        known = step is not None and (directory / CONFIG_FILE).exists()
        claim(directory, _recipe(setup, config), {"train": setup.table.fingerprint}, resuming=known)
        settings |= {"checkpoints": checkpoints, "resume_step": step, "should_stop": stop}
        settings |= {"profile": directory / FOLDER}
        state = train_setup(again, objective, plan, listeners=[*watching, JsonLines(directory)], **settings)
    return state, history


def _recipe(setup: RunSetup, config: Config) -> dict[str, Any]:
    """What can be said of a run whose model, loss and optimizer are objects, for a resumed one to be compared with."""
    told = dataclasses.replace(config, data=setup.data, seed=setup.order.seed).to_dict()
    train = {key: told["train"][key] for key in ("batch_size", "duration")}
    return {"seed": told["seed"], "data": told["data"], "train": train}


def evaluate(state: TrainState, setup: RunSetup, table: Table, loss: Loss = softmax_cross_entropy) -> dict[str, float]:
    """Means of the loss, top-1 and top-5 over a table, each example once, with their `count`."""
    return setup.evaluator(setup.objective(loss), table)(state)


def topk_accuracy(state: TrainState, setup: RunSetup, table: Table, k: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """The share of a table's examples whose label is among the k largest logits, for each k.

    Raises:
        InputError: a k below 1 or above the number of classes.
    """
    for each in k:
        if not 1 <= each <= table.num_classes:
            raise InputError(f"k={each}: expected 1 to {table.num_classes}, the number of classes")
    metrics = {f"top{each}": top_k(each) for each in k}
    figures = setup.evaluator(setup.objective(softmax_cross_entropy, metrics), table)(state)
    return {each: figures[f"top{each}"] for each in k}


def show_predictions(state: TrainState, setup: RunSetup, table: Table, count: int = 12) -> "Figure":
    """The first `count` examples of a table with label, prediction and probability, as a figure for a notebook."""
    # A machine that only trains needs no matplotlib.
    from jaxddp.training.image_grid import prediction_grid

    predict = make_predict(setup.objective(softmax_cross_entropy), setup.topology)
    batches: list[tuple[Batch, np.ndarray]] = []
    for batch in setup.eval_batches(table, setup.order.batch_size):
        batches.append((batch, np.asarray(jax.nn.softmax(predict(state, batch)))))
        if sum(int(b.mask.sum()) for b, _ in batches) >= count:
            break
    count = min(count, len(table))
    images, labels, probabilities = (
        np.concatenate(parts)[:count]
        for parts in zip(*[(np.asarray(b.image), np.asarray(b.label), p) for b, p in batches], strict=True)
    )
    # A listing without labels has no classes of its own.
    return prediction_grid(images, labels, probabilities, table.class_names or setup.table.class_names)
