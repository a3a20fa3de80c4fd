"""A Config becomes a run: its tables, network, optimizer and plan, and what training and evaluating it means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

import jaxddp.files as files
from jaxddp.config import Config, ParallelConfig
from jaxddp.data.opening import Table, open_tables
from jaxddp.data.order import SampleOrder
from jaxddp.engine.compiler_options import compiler_options
from jaxddp.engine.objective import cross_entropy
from jaxddp.engine.optimizer import make_optimizer, make_schedule
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError
from jaxddp.experiment.batches import check_comparable
from jaxddp.experiment.resume import Resume, check_shared, claim, held, resume_step
from jaxddp.experiment.setup import RunSetup, prepare, train
from jaxddp.job.environment import Job, find_job
from jaxddp.job.membership import Limits, agree, exchange, is_first, join
from jaxddp.job.preemption import stop_on_sigterm
from jaxddp.measure.profile import FOLDER
from jaxddp.mesh import Topology, simulate_cpu_devices
from jaxddp.models.resnet import resnet
from jaxddp.overrides import flatten
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.events import Listener
from jaxddp.training.listeners.curves import CURVES, Curves
from jaxddp.training.listeners.jsonl import METRICS, JsonLines
from jaxddp.training.listeners.parameters import ParameterOverview
from jaxddp.training.listeners.tensorboard import TensorBoard
from jaxddp.training.plan import Plan


@dataclass(frozen=True)
class Recipe:
    """The objects that a config names. Order, plan and learning rate follow from it and the training table's length.

    Its config is the one given, with what that left to the devices.
    """

    config: Config
    topology: Topology
    train_table: Table
    val_table: Table
    order: SampleOrder
    plan: Plan
    learning_rate: optax.Schedule
    compiler_options: Mapping[str, str]

    @classmethod
    def of(cls, config: Config) -> "Recipe":
        """Join the job, find the devices and open the data; nothing of the run is compiled yet.

        Raises:
            InputError: anything in the config or in the data that cannot be used.
        """
        topology = start(config)
        if config.train.precision is None:
            config = config.replace(train={"precision": "float32" if topology.platform == "cpu" else "bfloat16"})
        topology.check_batch_size(config.train.batch_size)
        topology.check_batch_size(config.eval.batch_size, "eval.batch_size")
        options = compiler_options(config.parallel.xla_options)
        train_table, val_table = open_tables(config.data)
        agree({"validation data": val_table.fingerprint})
        check_comparable(val_table, train_table, config.data)
        order = SampleOrder(len(train_table), config.train.batch_size, config.seed)
        plan = Plan.of(config, len(train_table))
        sizes = {"num_examples": plan.num_examples, "batch_size": plan.batch_size}
        warmup = config.optimizer.warmup.steps(**sizes, total_steps=plan.total_steps)
        schedule = make_schedule(config.optimizer, total_steps=plan.total_steps, warmup_steps=warmup)
        return cls(config, topology, train_table, val_table, order, plan, schedule, options)

    def setup(self) -> RunSetup:
        """Initialize the network; see `jaxddp.experiment.setup.prepare`."""
        config = self.config
        return prepare(
            self.network(),
            self.train_table,
            make_optimizer(config.optimizer, self.learning_rate),
            self.topology,
            self.order,
            data=config.data,
            dtype=self.precision,
            compiler_options=self.compiler_options,
        )

    def network(self) -> Any:
        """The config's network, with as many outputs as the data has classes."""
        model = self.config.model
        return resnet(
            model.name,
            self.train_table.num_classes,
            width=model.width,
            stem=model.stem,
            batch_norm=model.batch_norm,
            zero_init_last_scale=model.zero_init_last_scale,
            weight_init=model.weight_init,
            dtype=self.precision,
        )

    @property
    def precision(self) -> str:
        """Of the computation; `of` has settled it."""
        assert self.config.train.precision is not None
        return self.config.train.precision

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"train": self.train_table.fingerprint, "val": self.val_table.fingerprint}


def start(config: Config) -> Topology:
    """Join the job of the environment, see that all have this config, and lay out the devices."""
    join_job(find_job(), config.parallel)
    agree({key: str(value) for key, value in flatten(config.to_dict()).items()})
    return Topology.create(config.parallel.devices)


def join_job(job: Job | None, parallel: ParallelConfig) -> None:
    """Simulate CPU devices where the config asks for them, and join the job, with the config's limits to every wait.

    What is compiled from here on is kept for the next start.
    """
    if parallel.cpu_devices is not None:
        simulate_cpu_devices(parallel.cpu_devices)
    limits = Limits(
        start=parallel.start_timeout, silence=parallel.heartbeat_timeout, shutdown=parallel.shutdown_timeout
    )
    join(job, limits)
    keep_compiled_programs()


def train_recipe(
    config: Config,
    directory: Path,
    *,
    resume: Resume = "auto",
    listeners: Sequence[Listener] = (),
) -> TrainState:
    """Train a config in a work directory: resume or begin, save, validate, and leave figures and curves behind.

    SIGTERM makes it save and stop.

    Args:
        listeners: beside those that write into the work directory.

    Raises:
        InputError, NonFiniteError, Preempted: see `jaxddp.errors`.
    """
    recipe = Recipe.of(config)
    config = recipe.config
    check_shared(files.create(directory))
    with (
        held(directory),
        Checkpoints(directory / "checkpoints", keep=config.checkpoint.keep) as checkpoints,
        stop_on_sigterm() as stop,
    ):
        step = resume_step(checkpoints, resume)
        claim(directory, config.to_dict(), recipe.fingerprints, resuming=step is not None)
        setup = recipe.setup()
        objective = setup.objective(cross_entropy(config.train.label_smoothing))
        return train(
            setup,
            objective,
            recipe.plan,
            evaluator=_evaluator(recipe, setup),
            checkpoints=checkpoints,
            resume_step=step,
            listeners=[*listeners, *_writers(config, directory)],
            learning_rate=recipe.learning_rate,
            should_stop=stop,
            profile=directory / FOLDER,
        )


def evaluate_recipe(config: Config, directory: Path, which: str = "latest") -> dict[str, float]:
    """The validation figures of a checkpoint ("latest", "best" or a step): means, `count` and `step`.

    Raises:
        InputError: no such checkpoint, one of another architecture, or whatever is wrong with config and data.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such work directory; check --workdir")
    recipe = Recipe.of(config)
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        _agreed_step(checkpoints, which)
    setup = recipe.setup()
    # Looked up again: while this compiled, a run may have gone on.
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        step = _agreed_step(checkpoints, which)
        state, _ = checkpoints.restore(step, setup.state)
    return {"step": step, **_evaluator(recipe, setup)(state)}


def _agreed_step(checkpoints: Checkpoints, which: str) -> int:
    """The step of a checkpoint, as process 0 sees it."""
    seen = str(checkpoints.step(which)) if is_first() else ""
    return int(exchange("checkpoint", seen)[0])


def _evaluator(recipe: Recipe, setup: RunSetup) -> Evaluator:
    """Its figures are of the labels as they are; smoothing is a device of training."""
    return setup.evaluator(setup.objective(cross_entropy()), recipe.val_table, recipe.config.eval.batch_size)


def _writers(config: Config, directory: Path) -> list[Listener]:
    """What watches every run of a work directory. The curves are drawn from the lines, so they come after them."""
    writers: list[Listener] = [ParameterOverview(directory), JsonLines(directory)]
    if "tensorboard" in config.log.to:
        writers.append(TensorBoard(directory))
    return [*writers, Curves(directory / METRICS, directory / CURVES)]
