"""A recipe file's training in a work directory: what `jaxddp train` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

import jaxddp.job.progress as progress
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.data.labels import is_multi_label
from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError
from jaxddp.experiment.chosen_metrics import check_wanted
from jaxddp.experiment.ended import how_it_ended
from jaxddp.experiment.feed import Feed
from jaxddp.experiment.joined import joined
from jaxddp.experiment.judged import judgement_of
from jaxddp.experiment.objective_identity import objective_fingerprints
from jaxddp.experiment.prepare import initialize, make_feed, make_preprocess
from jaxddp.experiment.recipe import Recipe, TrainingData, check_listeners, recipe_of
from jaxddp.experiment.resources import Resources, open_resources
from jaxddp.experiment.resume import Claim, claim
from jaxddp.experiment.session import Resume, session
from jaxddp.experiment.setup import RunSetup
from jaxddp.job.membership import is_first
from jaxddp.recipe_file import RecipeFile
from jaxddp.schedules.peak import derivation
from jaxddp.training.loggers import make_loggers
from jaxddp.training.loop import fit
from jaxddp.training.plan import Plan


@dataclass(frozen=True)
class Experiment:
    """What a recipe file trains and on what, as in `RunSetup`; nothing is compiled yet.

    The recipe's config is the file's, with what was overridden, and with what that left open; see `joined`.
    """

    file: RecipeFile
    recipe: Recipe
    resources: Resources
    feed: Feed
    preprocess: Preprocess

    @property
    def config(self) -> Config:
        return self.recipe.config

    def setup(self, *, fresh: bool = True) -> RunSetup:
        """Initialize the network; see `jaxddp.experiment.prepare.initialize`."""
        return initialize(self.recipe, self.resources, self.feed, self.preprocess, fresh=fresh)


@progress.phase("start")
def open_experiment(file: RecipeFile, learning_rate: optax.Schedule | None = None) -> Experiment:
    """Join the job, find the devices, open the data and make the recipe's objects. Raises: InputError.

    Args:
        learning_rate: what the optimizer follows in place of the config's schedule.
    """
    topology, config = joined(file)
    resources = open_resources(config, topology)
    with progress.doing("making network, loss and optimizer"):
        recipe = recipe_of(file, config, TrainingData.of(resources.train, config.data), topology, learning_rate)
        # What is wrong with these is said before there is a work directory, and before anything is compiled.
        judgement_of(recipe, resources)
        feed = make_feed(recipe, resources)
        try:
            preprocess = make_preprocess(recipe, resources)
        except InputError as error:
            hook = file.hooks.get("get_augmentation")
            if hook is None or not str(error).startswith("augmentation: "):
                raise
            raise InputError(f"{hook.name}: {error}") from error
    return Experiment(file, recipe, resources, feed, preprocess)


@progress.phase("start")
def train(
    experiment: Experiment, directory: Path, *, resume: Resume = "auto", listeners: Sequence[Any] = ()
) -> TrainState | None:
    """Train in a work directory: resume or begin, save, validate, and log as the config says.

    SIGTERM makes it save and stop. The listeners are beside those of the config and of the recipe file. Of a run that
    has ended and is asked for nothing else, a line says so: nothing is compiled, no image is read, and None returned.

    Raises:
        InputError, NonFiniteError, Preempted: see `jaxddp.errors`.
    """
    # What runs here may change the working directory.
    config, file, directory = experiment.config, experiment.file, directory.absolute()
    loggers = make_loggers(config, directory)
    resources = experiment.resources
    splits = {"train": resources.train, "val": resources.val, "unlabelled": resources.unlabelled}
    check_wanted(loggers, multi_label=is_multi_label(resources.train))
    fingerprints = {split: source.fingerprint for split, source in splits.items() if source is not None}
    fingerprints |= objective_fingerprints(experiment.recipe, resources)
    with session(directory, keep=config.checkpoint.keep, goal=config.checkpoint.goal, resume=resume) as own:
        claimed = Claim(config.to_dict(), fingerprints, file)
        content, is_same = claim(directory, claimed, resuming=own.resume_step is not None, run_id=own.run_id)
        own.belongs_to(content)
        total_steps = Plan.of(config, len(resources.train)).total_steps
        if told := how_it_ended(directory, own.resume_step, total_steps, is_same=is_same):
            if is_first():
                print(f"{directory}: {told}", flush=True)
            return None
        hook = file.hooks.get("get_listeners") if is_first() else None
        of_file = [] if hook is None else check_listeners(hook(config, directory), hook.name)
        setup = experiment.setup(fresh=own.resume_step is None)
        if is_first() and (line := derivation(config)):
            print(line, flush=True)
        return fit(setup.run(own, listeners=[*listeners, *loggers, *of_file], config=content))
