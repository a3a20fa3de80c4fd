"""Trains a run in its work directory, for `jaxddp train` with a recipe file and for `jaxddp.train` with a setup."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, Option
from jaxddp.core.phases import phase
from jaxddp.engine.state import TrainState
from jaxddp.job.environment import report_work
from jaxddp.recipe_file import RUN_ID
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.schedules.peak import derivation
from jaxddp.setup.configured_metrics import check_requested_metrics
from jaxddp.setup.experiment import Experiment
from jaxddp.setup.identity import objective_fingerprints
from jaxddp.setup.make_run import make_run
from jaxddp.setup.measured_shares import SharesFile, settle_shares
from jaxddp.setup.prepare import initialize
from jaxddp.setup.run_setup import RunSetup, check_start
from jaxddp.setup.user_objects import check_listeners, objects_of_hooks
from jaxddp.training.evaluation import Measure
from jaxddp.training.listeners.notifier import make_loggers
from jaxddp.training.loop import fit
from jaxddp.workdir.claim import Claim, claim, describe_end
from jaxddp.workdir.session import Resume, session
from jaxddp.workdir.signature import Signature


@dataclass(frozen=True)
class TrainingTask:
    """An experiment to train, and the parts of training that differ between the command line and the Python API.

    Attributes:
        claimed: the content of config.json.
        begin: a function that returns the setup. If `fresh`, it initializes the state; otherwise a checkpoint replaces
            the state. The run consumes the state.
        listeners: a function that returns the listeners of the recipe file for a work directory.
        restores_ended: whether `train` restores a run that has ended and returns its state; otherwise it returns None.
    """

    experiment: Experiment
    claimed: Claim
    begin: Callable[..., RunSetup]
    listeners: Callable[[Path], Sequence[Any]] = lambda directory: ()
    restores_ended: bool = True


def task_of_file(experiment: Experiment) -> TrainingTask:
    """Return the task of a recipe file; its state is initialized after the check of the work directory."""
    file, peers = experiment.file, experiment.topology.peers

    def listeners(directory: Path) -> Sequence[Any]:
        hooks = {} if file is None or not peers.is_first else file.hooks
        hook = objects_of_hooks(hooks)("listeners", experiment.config, directory)
        return () if hook is None else check_listeners(hook.value, hook.where)

    def begin(*, fresh: bool) -> RunSetup:
        setup = initialize(experiment, fresh=fresh)
        if peers.is_first and (line := derivation(experiment.config)):
            print(line, flush=True)
        return setup

    claimed = Claim(experiment.config.to_dict(), _fingerprints(experiment), file)
    return TrainingTask(experiment, claimed, begin, listeners, restores_ended=False)


def train_setup(
    setup: RunSetup, directory: Path | None, listeners: Sequence[Any] = (), evaluators: Sequence[Measure] = ()
) -> TrainState:
    """Train a setup without changing it; see `train`."""
    # The digests of objects are compared with a resumed run, and between processes.
    needs_identity = directory is not None or not setup.topology.peers.is_alone
    claimed = _claim_of(setup, setup.identity() if needs_identity else {})

    def begin(*, fresh: bool) -> RunSetup:
        check_start(setup, resumes=not fresh)
        # Training consumes the state.
        return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))

    training = TrainingTask(setup.experiment, claimed, begin)
    state = train(training, directory, listeners=listeners, evaluators=evaluators)
    assert state is not None  # With `restores_ended`, a run that has ended is restored.
    return state


@report_work()
@phase("start")
def train(
    training: TrainingTask,
    directory: Path | None,
    *,
    resume: Resume = "auto",
    listeners: Sequence[Any] = (),
    evaluators: Sequence[Measure] = (),
) -> TrainState | None:
    """Train, and return the last state.

    If the run has already ended with the same length and `training.restores_ended` is False, print what it reached and
    return None.

    With a directory, start or resume the run in it, and save, validate and log as configured. After SIGTERM, the run
    saves and stops. Without a directory nothing is saved.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.core.errors`.
    """
    experiment, config, claimed = training.experiment, training.experiment.config, training.claimed
    if directory is None:
        setup = settle_shares(training.begin(fresh=True))
        return fit(make_run(setup, listeners, evaluators, claimed.objects, claimed.record()))
    # The user's code may change the current directory.
    peers = experiment.topology.peers
    try:
        directory = directory.absolute()
    except FileNotFoundError:
        problem = Option("workdir", directory), ": the current directory does not exist"
        raise InputError(*problem, advice="go to another directory, or give an absolute path") from None
    loggers = make_loggers(config, directory)
    check_requested_metrics(loggers, experiment.layout.training_data.labels)
    goal = experiment.recipe.goal
    with session(directory, peers, keep=config.checkpoint.keep, goal=goal, resume=resume) as opened:
        # Older releases wrote no config.json for runs from Python.
        has_config = experiment.file is not None or (directory / CONFIG_FILE).exists()
        resuming = has_config and opened.resume_step is not None
        signature = Signature.of(experiment.resources.train, config.data)
        if opened.resume_step is not None:
            signature.check_resumed(directory)
        record, is_same = claim(directory, claimed, peers, resuming=resuming, run_id=opened.run_id)
        opened.set_identity(record)
        is_same = is_same and not training.restores_ended
        if ended := describe_end(directory, opened.resume_step, peers, is_same=is_same):
            if peers.is_first:
                print(ended, flush=True)
            return None
        all_listeners = [*listeners, *loggers, *training.listeners(directory)]
        setup = training.begin(fresh=opened.resume_step is None)
        shares = SharesFile.of(directory, record[RUN_ID], setup.topology)
        setup = settle_shares(setup, shares, resumes=opened.resume_step is not None)
        run = make_run(setup, all_listeners, evaluators, claimed.objects, record)
        if peers.is_first:
            signature.write(directory, record[RUN_ID])
        return fit(opened.restore_into(run))


def _claim_of(setup: RunSetup, objects: Mapping[str, str]) -> Claim:
    """Return the claim of a run from Python; `objects` are the digests of its model, loss, optimizer and so on."""
    settings, train_keys = setup.recipe.config.to_dict(), ("batch_size", "duration", "gradient_precision")
    config = {
        "seed": settings["seed"],
        "data": settings["data"],
        "train": {key: settings["train"][key] for key in train_keys},
    }
    if settings["train"]["sync_every"] is not None:
        is_mean = settings["train"]["outer_optimizer"] == "mean"
        outer = ["sync_every"] if is_mean else ["sync_every", "outer_optimizer", "outer_rate", "outer_momentum"]
        config["train"] |= {key: settings["train"][key] for key in outer}
    # None stands for float32, as in older releases, which wrote no precision.
    precision = settings["train"]["precision"]
    config["train"]["precision"] = None if precision == "float32" else precision
    config["parallel"] = {"reproducible": settings["parallel"]["reproducible"]}
    fingerprints = _fingerprints(setup.experiment)
    # Each call of `train` may have other validation data.
    fingerprints.pop("val", None)
    return Claim(config, fingerprints, objects=objects)


def _fingerprints(experiment: Experiment) -> dict[str, str]:
    """Return the fingerprints of the data and of the objective. All processes must call this function together."""
    resources = experiment.resources
    splits = {"train": resources.train, "val": resources.val, "unlabelled": resources.unlabelled}
    fingerprints = {split: source.fingerprint for split, source in splits.items() if source is not None}
    return fingerprints | objective_fingerprints(experiment)
