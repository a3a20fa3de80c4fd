"""Trains a run in its work directory, for `jaxddp train` with a recipe file and for `jaxddp.train` with a setup."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, Option
from jaxddp.core.phases import phase
from jaxddp.engine.state import TrainState
from jaxddp.job.environment import report_work
from jaxddp.recipe_file import RUN_ID
from jaxddp.schedules import derivation
from jaxddp.setup.configured_metrics import check_requested_metrics
from jaxddp.setup.identity import objective_fingerprints
from jaxddp.setup.make_run import make_run
from jaxddp.setup.measured_shares import SharesFile, settle_shares
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import RunSetup, check_start, initialize
from jaxddp.setup.user_objects import check_listeners, objects_of_hooks
from jaxddp.training.evaluation import Measure
from jaxddp.training.listeners.notifier import make_loggers
from jaxddp.training.loop import fit
from jaxddp.workdir.claim import Claim, claim, describe_end
from jaxddp.workdir.session import Resume, session
from jaxddp.workdir.signature import Signature


@report_work()
@phase("start")
def train(
    recipe: Recipe,
    directory: Path | None,
    *,
    resume: Resume = "auto",
    listeners: Sequence[Any] = (),
    evaluators: Sequence[Measure] = (),
) -> TrainState | None:
    """Train a recipe of a file, or a setup of the Python API, which is not changed. Return the last state.

    With a directory, start or resume the run in it, and save, validate and log as configured. After SIGTERM, the run
    saves and stops. Without a directory nothing is saved.

    If the run of a recipe file has already ended with the same length, print what it reached and return None. The state
    of a setup whose run has ended is restored.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.core.errors`.
    """
    peers, config = recipe.topology.peers, recipe.config
    claimed = _claim(recipe, directory)
    if directory is None:
        setup = settle_shares(_begin(recipe, resumes=False))
        return fit(make_run(setup, listeners, evaluators, claimed.objects, claimed.record()))
    # The user's code may change the current directory.
    try:
        directory = directory.absolute()
    except FileNotFoundError:
        problem = Option("workdir", directory), ": the current directory does not exist"
        raise InputError(*problem, advice="go to another directory, or give an absolute path") from None
    loggers = make_loggers(config, directory)
    check_requested_metrics(loggers, recipe.layout.training_data.labels)
    with session(directory, peers, keep=config.checkpoint.keep, goal=recipe.goal, resume=resume) as opened:
        resumes = opened.resume_step is not None
        signature = Signature.of(recipe.resources.train, config.data)
        if resumes:
            signature.check_resumed(directory)
        record, is_same = claim(directory, claimed, peers, resuming=resumes)
        opened.set_identity(record)
        is_same = is_same and recipe.file is not None
        if ended := describe_end(directory, opened.resume_step, peers, is_same=is_same):
            if peers.is_first:
                print(ended, flush=True)
            return None
        all_listeners = [*listeners, *loggers, *_listeners_of_hook(recipe, directory)]
        setup = _begin(recipe, resumes=resumes)
        setup = settle_shares(setup, SharesFile.of(directory, record[RUN_ID], setup.topology), resumes=resumes)
        run = make_run(setup, all_listeners, evaluators, claimed.objects, record)
        if peers.is_first:
            signature.write(directory, record[RUN_ID])
        return fit(opened.restore_into(run))


def _begin(recipe: Recipe, *, resumes: bool) -> RunSetup:
    """Initialize the network of a recipe, or copy the state of a setup, because a run consumes its state.

    Args:
        resumes: whether a checkpoint replaces the state.
    """
    if isinstance(recipe, RunSetup):
        check_start(recipe, resumes=resumes)
        return dataclasses.replace(recipe, state=jax.tree.map(jnp.copy, recipe.state))
    setup = initialize(recipe, fresh=not resumes)
    if recipe.topology.peers.is_first and (line := derivation(recipe.config)):
        print(line, flush=True)
    return setup


def _listeners_of_hook(recipe: Recipe, directory: Path) -> Sequence[Any]:
    """Return the listeners of the recipe file, which only the first process calls."""
    hooks = recipe.file.hooks if recipe.file is not None and recipe.topology.peers.is_first else {}
    hook = objects_of_hooks(hooks)("listeners", recipe.config, directory)
    return () if hook is None else check_listeners(hook.value, hook.where)


def _claim(recipe: Recipe, directory: Path | None) -> Claim:
    """Return the claim of a run. All processes must call this function together.

    The claim of a setup has digests of its model, loss, optimizer and so on in place of the settings that name them.
    They are compared with a resumed run, and between processes.
    """
    fingerprints, settings = _fingerprints(recipe), recipe.config.to_dict()
    if not isinstance(recipe, RunSetup):
        return Claim(settings, fingerprints, recipe.file)
    # Each call of `train` may have other validation data.
    fingerprints.pop("val", None)
    keys = ["batch_size", "duration", "gradient_precision", "precision"]
    if settings["train"]["sync_every"] is not None:
        is_mean = settings["train"]["outer_optimizer"] == "mean"
        keys += ["sync_every"] if is_mean else ["sync_every", "outer_optimizer", "outer_rate", "outer_momentum"]
    config = {
        "seed": settings["seed"],
        "data": settings["data"],
        "train": {key: settings["train"][key] for key in keys},
        "parallel": {"reproducible": settings["parallel"]["reproducible"]},
    }
    needs_identity = directory is not None or not recipe.topology.peers.is_alone
    return Claim(config, fingerprints, objects=recipe.identity() if needs_identity else {})


def _fingerprints(recipe: Recipe) -> dict[str, str]:
    """Return the fingerprints of the data and of the objective. All processes must call this function together."""
    resources = recipe.resources
    splits = {"train": resources.train, "val": resources.val, "unlabelled": resources.unlabelled}
    fingerprints = {split: source.fingerprint for split, source in splits.items() if source is not None}
    return fingerprints | objective_fingerprints(recipe)
