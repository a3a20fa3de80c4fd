"""Setups, runs and experiments made in a few words, for the tests that train them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax
from small import linear_model, random_table

import jaxddp
from jaxddp.config import Config, DataConfig
from jaxddp.engine.compiler_options import compiler_options
from jaxddp.engine.loss import Loss, example_loss
from jaxddp.experiment import experiment
from jaxddp.experiment.chosen_metrics import configured_metrics
from jaxddp.experiment.prepare import prepare
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.resources import Resources
from jaxddp.experiment.session import Session
from jaxddp.experiment.setup import RunSetup
from jaxddp.losses.cross_entropy import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.recipe_file import RecipeFile
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.loop import fit


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
    **more: Any,
) -> RunSetup:
    """A setup of objects, as `prepare_training` makes it: `more` are further fields of `Recipe`."""
    table = random_table(50) if table is None else table
    topology = devices if isinstance(devices, Topology) else Topology.create(devices)
    # Of hundreds of small runs each would compile a test of its gradient.
    config = config or Config().replace(parallel={"self_test": "never"})
    config = config.replace(seed=seed, train={"batch_size": batch_size})
    config = dataclasses.replace(config, data=data or DataConfig())
    taken_apart = example_loss(loss or cross_entropy(), table.num_classes)
    recipe = Recipe(
        config=config,
        model=adapt(model),
        optimizer=optimizer,
        loss=taken_apart,
        eval_loss=taken_apart,
        metrics=configured_metrics(config, table.num_classes),
        **more,
    )
    return prepare(recipe, Resources(topology, table, compiler_options=compiler_options(xla_options)))


def changed(setup: RunSetup, changes: Mapping[str, Any], val: Any = None, **more: Any) -> RunSetup:
    """The setup with other numbers in its config, validated on `val`; `more` are further fields of `Recipe`."""
    recipe = dataclasses.replace(setup.recipe, config=setup.recipe.config.replace(**changes), **more)
    return dataclasses.replace(setup, recipe=recipe, resources=dataclasses.replace(setup.resources, val=val))


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
    """Train a setup under a config changed so; consumes its state."""
    made = changed(setup, {"eval": {"batch_size": setup.order.batch_size}} | dict(changes), val, **more)
    own = None
    if checkpoints is not None:
        own = Session(checkpoints.directory.parent, checkpoints, resume_step)
    run = made.run(own, listeners=listeners, evaluators=evaluators)
    stop = should_stop or (lambda step: False)
    return fit(dataclasses.replace(run, profile=profile, should_stop=stop))


def logged_in_two_parts(workdir: Path, train: Any, val: Any, log_to: str | list[str]) -> Path:
    """The work directory of a run of one epoch that was then resumed for a second one."""
    for epochs in (1, 2):
        setup = jaxddp.prepare_training(linear_model(), train, 2, optax.sgd(0.1), 4, epochs=2)
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
    """A recipe file that holds a config alone."""
    return RecipeFile(config, Path("a test"), Path())


def experiment_of(config: Config) -> experiment.Experiment:
    """What the terminal makes of a config."""
    return experiment.open_experiment(file_of(config))


def train_config(config: Config, directory: Path, **more: Any) -> Any:
    """As `jaxddp train` does."""
    return experiment.train(experiment_of(config), directory, **more)


def evaluate_config(config: Config, directory: Path, which: str = "latest") -> dict[str, float]:
    """As `jaxddp eval` does."""
    return experiment.evaluate(experiment_of(config), directory, which)
