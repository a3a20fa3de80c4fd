"""Create recipes, setups and runs for tests that train them."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxddp
from jaxddp.cli import main
from jaxddp.config import Config, DataConfig
from jaxddp.data.source import labels_of
from jaxddp.engine.compilation import compiler_options
from jaxddp.engine.objective import Loss
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.resources import Layout, Resources, TrainingData
from jaxddp.setup.run_setup import RunSetup, initialize, open_recipe
from jaxddp.setup.run_training import make_run
from jaxddp.setup.user_objects import metrics_of, objects_of_arguments
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.loop import fit
from jaxddp.workdir.session import Session
from support.data import random_table
from support.networks import linear_model
from support.shared import PROGRAMS, adapted, interned, plain_loss, sgd, shared, taken_apart, topology_of

SMALL = [
    *("--model.name", "resnet10", "--model.width", "2", "--train.label-smoothing", "0.1"),
    *("--data.image-size", "16", "--data.resize", "16", "--data.augment.pad", "1"),
    *("--train.batch-size", "8", "--eval.batch-size", "8", "--log.to", "jsonl,parameters"),
]
"""The arguments that make `train digits` small."""


def setup_of(
    model: Any,
    optimizer: Any,
    table: Any = None,
    *,
    devices: Any = 1,
    data: DataConfig | None = None,
    config: Config | None = None,
    batch_size: int = 8,
    seed: int = 0,
    loss: Loss | None = None,
    xla_options: tuple[str, ...] = (),
    share: bool = True,
    **more: Any,
) -> RunSetup:
    """Create a setup from objects, as `prepare_training` does. `more` are additional fields of `Recipe`.

    Programs are shared with all setups of equal objects, unless `share` is false; see `support.shared`."""
    table = random_table(50) if table is None else table
    topology = devices if isinstance(devices, Topology) else topology_of(devices)
    # Without this, each of hundreds of small runs would compile a self-test.
    config = config or Config().replace(parallel={"self_test": "never"})
    config = config.replace(seed=seed, train={"batch_size": batch_size})
    config = dataclasses.replace(config, data=data or DataConfig())
    own_loss = taken_apart(loss or plain_loss(), labels_of(table).kind)
    resources = Resources(table, compiler_options=compiler_options(xla_options))
    objects = {"model": adapted(model) if share else adapt(model), "optimizer": optimizer}
    objects |= {"loss": own_loss, "eval_loss": own_loss}
    objects["metrics"] = interned(metrics_of(config, labels_of(table).kind, objects_of_arguments()))
    objects |= {name: interned(value) for name, value in more.items()}
    layout = Layout.of(config, topology, TrainingData.of(table, config.data))
    recipe = Recipe.of(config, topology, resources, layout, objects)
    return shared(initialize(recipe, programs=PROGRAMS)) if share else initialize(recipe)


def changed(setup: RunSetup, changes: Mapping[str, Any], val: Any = None, **more: Any) -> RunSetup:
    """Return the setup with changes to its config, validated on `val`. `more` are additional fields of `Recipe`."""
    resources = dataclasses.replace(setup.resources, val=val)
    return setup.changed(resources=resources, config=setup.config.replace(**changes), **more)


def copy_setup(setup: RunSetup) -> RunSetup:
    """Return the setup, with its compiled programs and a copy of its state."""
    return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))


def train(
    setup: RunSetup,
    changes: Mapping[str, Any],
    *,
    val: Any = None,
    checkpoints: Checkpoints | None = None,
    resume_step: int | None = None,
    should_stop: Any = None,
    profile: Path | None = None,
    listeners: Any = (),
    evaluators: Any = (),
    **more: Any,
) -> Any:
    """Train a setup under a changed config. This consumes its state."""
    made = changed(setup, {"eval": {"batch_size": setup.feed.order.batch_size}} | dict(changes), val, **more)
    run = make_run(made, listeners, evaluators)
    if checkpoints is not None:
        run = Session(checkpoints.directory.parent, checkpoints, resume_step).restore_into(run)
    stop = should_stop or (lambda step: False)
    return fit(dataclasses.replace(run, profile=profile, should_stop=stop))


def logged_in_two_parts(workdir: Path, train: Any, val: Any, log_to: str | list[str]) -> Path:
    """Return the work directory of a run of one epoch that was resumed for a second one."""
    for epochs in (1, 2):
        setup = shared(jaxddp.prepare_training(linear_model(), train, 2, sgd(0.1), 4, epochs=2))
        jaxddp.train(
            *(jaxddp.softmax_cross_entropy, setup),
            val=val,
            epochs=epochs,
            listeners=(),
            workdir=workdir,
            log_to=log_to,
            log_every="1 step",
        )
    return workdir


def file_of(config: Config) -> RecipeFile:
    """Return a recipe file with a config alone."""
    return RecipeFile(config, Path("a test"))


def recipe_of(config: Config) -> Recipe:
    """Return the recipe of a config that the command line parses."""
    return open_recipe(file_of(config))


RECIPE = str(Path(__file__).parents[1] / "recipes" / "small_recipe.py")


LEAN = ["--parallel.devices", "2", "--parallel.self-test", "never", "--log.to", "jsonl"]
"""Options for runs from the command line in tests of something else."""


def train_words(data: Path, workdir: Path, *more: str) -> list[str]:
    smoothing = ["--train.label-smoothing", "0.1"]
    return ["train", RECIPE, "--data.path", str(data), "--workdir", str(workdir), *smoothing, *more]


def plan_of(steps: int = 20, **cadences: str) -> dict:
    """Return changes to a config: the number of steps, and the cadences of its sections."""
    every = {"log": "5 steps", "eval": "1 epoch", "checkpoint": "4 steps", **cadences}
    sections = {name: {"every": value} for name, value in every.items()}
    sections["eval"]["batch_size"] = 8
    return {"train": {"duration": f"{steps} steps"}, **sections}


def fails(arguments: list[str], capfd, code: int = 2) -> str:
    """Return the one line that a command writes to stderr."""
    assert main(arguments) == code
    error = capfd.readouterr().err
    assert "Traceback" not in error
    last = error.rstrip("\n").split("\n")[-1]
    assert last.startswith("jaxddp: ")
    return last


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


class Recorder:
    """A listener that stores all its events."""

    def __init__(self):
        self.moments, self.steps, self.evaluations, self.ends = [], [], [], []

    def start(self, run):
        self.moments.append(("start", run.start_step))

    def step(self, record):
        self.moments.append(("step", record.step))
        self.steps.append(record)

    def evaluation(self, record):
        if record.final:
            self.moments.append(("evaluation", record.step))
            self.evaluations.append(record)

    def end(self, run):
        self.moments.append(("end", run.status))
        self.ends.append(run)


@functools.cache
def exploding(step: int):
    """Return an optimizer whose update number `step` makes the parameters infinite."""
    return optax.sgd(lambda count: np.float32(1e-3) + (count == step - 1) * np.float32(np.inf))
