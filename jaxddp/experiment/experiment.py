"""A recipe file's training and evaluation in a work directory: what the terminal's commands do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxddp.config import Config
from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError
from jaxddp.experiment.recipe import Recipe, make_loggers, own_listeners, recipe_of
from jaxddp.experiment.resources import Resources, join_with, open_resources
from jaxddp.experiment.resume import Claim, claim
from jaxddp.experiment.session import CHECKPOINTS, Resume, session
from jaxddp.experiment.setup import RunSetup, make_feed, make_preprocess, prepare
from jaxddp.job.membership import exchange, is_first
from jaxddp.mesh import Topology
from jaxddp.recipe_file import RecipeFile
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.loop import fit


@dataclass(frozen=True)
class Experiment:
    """What a recipe file trains and on what; nothing is compiled yet.

    Attributes:
        file: where the recipe's hooks came from.
        recipe: its config is the file's, with what was overridden, and with what that left to the devices.
    """

    file: RecipeFile
    recipe: Recipe
    resources: Resources

    @property
    def config(self) -> Config:
        return self.recipe.config

    def setup(self) -> RunSetup:
        """Initialize the network; see `jaxddp.experiment.setup.prepare`."""
        return prepare(self.recipe, self.resources)


def open_experiment(file: RecipeFile) -> Experiment:
    """Join the job, find the devices, open the data and make the recipe's objects.

    Args:
        file: its config may have been overridden.

    Raises:
        InputError: anything in the config, the hooks or the data that cannot be used.
    """
    topology = join_with(file.config, file.digest())
    config = settled(file.config, topology)
    resources = open_resources(config, topology)
    recipe = recipe_of(file, config, resources.train.num_classes, len(resources.train))
    # What is wrong with them is said before there is a work directory, and before anything is compiled.
    make_feed(recipe, resources)
    try:
        make_preprocess(recipe, resources)
    except InputError as error:
        hook = file.hooks.get("get_augmentation")
        if hook is None or not str(error).startswith("augmentation: "):
            raise
        raise InputError(f"{hook.name}: {error}") from error
    return Experiment(file, recipe, resources)


def settled(config: Config, topology: Topology) -> Config:
    """The config with what it leaves to the devices: float32 on a CPU, bfloat16 on a GPU."""
    if config.train.precision is not None:
        return config
    return config.replace(train={"precision": "float32" if topology.platform == "cpu" else "bfloat16"})


def train(
    experiment: Experiment, directory: Path, *, resume: Resume = "auto", listeners: Sequence[Any] = ()
) -> TrainState:
    """Train in a work directory: resume or begin, save, validate, and log as the config says.

    SIGTERM makes it save and stop.

    Args:
        listeners: beside those of the config and of the recipe file.

    Raises:
        InputError, NonFiniteError, Preempted: see `jaxddp.errors`.
    """
    config, file = experiment.config, experiment.file
    loggers = make_loggers(config, directory)
    with session(directory, keep=config.checkpoint.keep, resume=resume) as own:
        claimed = Claim(config.to_dict(), experiment.resources.fingerprints, file)
        claim(directory, claimed, resuming=own.resume_step is not None)
        own_ones = own_listeners(file, config, directory) if is_first() else []
        return fit(experiment.setup().run(own, listeners=[*listeners, *loggers, *own_ones]))


def evaluate(experiment: Experiment, directory: Path, which: str = "latest") -> dict[str, float]:
    """The validation metrics of a checkpoint ("latest", "best" or a step): means, `count` and `step`.

    Raises:
        InputError: no such checkpoint, or one of another architecture.
    """
    kept, file = experiment.file.kept_digest, experiment.file
    if kept is not None and kept != file.digest():
        raise InputError(f"{file.root}: the run's copy of its recipe was changed since; restore it")
    setup, val = experiment.setup(), experiment.resources.val
    assert val is not None  # a config names both
    # Looked up after compiling, for a run may have gone on meanwhile.
    with Checkpoints(directory / CHECKPOINTS, read_only=True) as checkpoints:
        step = agreed_step(checkpoints, which)
        state, _ = checkpoints.restore(step, setup.state)
    return {"step": step, **setup.evaluator(val, experiment.config.eval.batch_size)(state)}


def check_checkpoint(directory: Path, which: str) -> None:
    """Fails before anything is compiled. Raises: InputError; there is no such checkpoint."""
    with Checkpoints(directory / CHECKPOINTS, read_only=True) as checkpoints:
        agreed_step(checkpoints, which)


def agreed_step(checkpoints: Checkpoints, which: str) -> int:
    """The step of a checkpoint, as process 0 sees it."""
    seen = str(checkpoints.step(which)) if is_first() else ""
    return int(exchange("checkpoint", seen)[0])
