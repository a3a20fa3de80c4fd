"""The only training: what `jaxddp train` does with a recipe file, and `jaxddp.train` with a setup."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.phases import phase
from jaxddp.engine.state import TrainState
from jaxddp.job.work_status import at_work
from jaxddp.recipe.configured_metrics import check_wanted
from jaxddp.recipe.object_checks import check_listeners
from jaxddp.recipe.user_objects import objects_of_hooks
from jaxddp.recipe_file import CONFIG_FILE, RUN_ID
from jaxddp.schedules.peak import derivation
from jaxddp.setup.experiment import Experiment
from jaxddp.setup.make_run import make_run
from jaxddp.setup.objective_identity import objective_fingerprints
from jaxddp.setup.prepare import initialize
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.state_checks import check_start
from jaxddp.training.listeners.notifier import make_loggers
from jaxddp.training.loop import fit
from jaxddp.training.validation.evaluator import Measure
from jaxddp.workdir.claim import Claim, claim
from jaxddp.workdir.ended import how_it_ended
from jaxddp.workdir.session import Resume, session
from jaxddp.workdir.signature import Signature


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, and what its two doors do differently.

    Attributes:
        claimed: what config.json says of it.
        begin: makes the setup of it, with a `fresh` state or with one that is going to be restored. Its run consumes
            the state.
        listeners: those that a recipe file brings, of the work directory.
        again: whether a run that has ended is restored, so that its state is returned.
    """

    experiment: Experiment
    claimed: Claim
    begin: Callable[..., RunSetup]
    listeners: Callable[[Path], Sequence[Any]] = lambda directory: ()
    again: bool = True


def of_file(experiment: Experiment) -> TrainingTask:
    """Of a recipe file, which is initialized once the work directory is known to be its own."""
    file, peers = experiment.file, experiment.topology.peers

    def listeners(directory: Path) -> Sequence[Any]:
        hooks = {} if file is None or not peers.is_first else file.hooks
        given = objects_of_hooks(hooks)("listeners", experiment.config, directory)
        return () if given is None else check_listeners(given.value, given.where)

    def begin(*, fresh: bool) -> RunSetup:
        setup = initialize(experiment, fresh=fresh)
        if peers.is_first and (line := derivation(experiment.config)):
            print(line, flush=True)
        return setup

    claimed = Claim(experiment.config.to_dict(), _fingerprints(experiment), file)
    return TrainingTask(experiment, claimed, begin, listeners, again=False)


def train_setup(
    setup: RunSetup, directory: Path | None, listeners: Sequence[Any] = (), evaluators: Sequence[Measure] = ()
) -> TrainState:
    """Train a setup, which stays as it was; see `train`."""
    # With those of a run, and of other processes.
    compared = directory is not None or not setup.topology.peers.is_alone
    claimed = _claim_of(setup, setup.identity() if compared else {})

    def begin(*, fresh: bool) -> RunSetup:
        check_start(setup, resumes=not fresh)
        # The step consumes what it is given.
        return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))

    training = TrainingTask(setup.experiment, claimed, begin)
    state = train(training, directory, listeners=listeners, evaluators=evaluators)
    assert state is not None  # A run that has ended is restored.
    return state


@at_work()
@phase("start")
def train(
    training: TrainingTask,
    directory: Path | None,
    *,
    resume: Resume = "auto",
    listeners: Sequence[Any] = (),
    evaluators: Sequence[Measure] = (),
) -> TrainState | None:
    """Train, and return the last state; None of a run that has ended and is asked for nothing else, as a line says.

    In a directory it resumes or begins, saves, validates and logs as its config says, and SIGTERM makes it save and
    stop. Without one nothing is kept.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.core.errors`.
    """
    experiment, config, claimed = training.experiment, training.experiment.config, training.claimed
    if directory is None:
        return fit(make_run(training.begin(fresh=True), listeners, evaluators, claimed.objects, claimed.record()))
    # What runs here may change the working directory.
    directory, peers = directory.absolute(), experiment.topology.peers
    loggers = make_loggers(config, directory)
    check_wanted(loggers, experiment.layout.training_data.labels)
    with session(directory, peers, keep=config.checkpoint.keep, goal=config.checkpoint.goal, resume=resume) as own:
        # Runs of setups once had no config.json.
        known = experiment.file is not None or (directory / CONFIG_FILE).exists()
        resuming = known and own.resume_step is not None
        record, is_same = claim(directory, claimed, peers, resuming=resuming, run_id=own.run_id)
        own.belongs_to(record)
        if not training.again:
            total_steps = experiment.layout.plan.total_steps
            if ended := how_it_ended(directory, own.resume_step, total_steps, peers, is_same=is_same):
                if peers.is_first:
                    print(f"{directory}: {ended}", flush=True)
                return None
        watching = [*listeners, *loggers, *training.listeners(directory)]
        setup = training.begin(fresh=own.resume_step is None)
        run = make_run(setup, watching, evaluators, claimed.objects, record)
        if peers.is_first:
            Signature.of(setup.table, setup.data).write(directory, record[RUN_ID])
        return fit(own.joined(run))


def _claim_of(setup: RunSetup, objects: Mapping[str, str]) -> Claim:
    """What is known of a run whose model, loss and optimizer are objects, of which `objects` is the identity."""
    told, numbers = setup.recipe.config.to_dict(), ("batch_size", "duration", "gradient_precision")
    config = {"seed": told["seed"], "data": told["data"], "train": {key: told["train"][key] for key in numbers}}
    # Of the input, and float32 where None: as runs of older releases, which claimed none, had it.
    precision = told["train"]["precision"]
    config["train"]["precision"] = None if precision == "float32" else precision
    config["parallel"] = {"reproducible": told["parallel"]["reproducible"]}
    fingerprints = _fingerprints(setup.experiment)
    # What is validated on is another argument of each call of `train`.
    fingerprints.pop("val", None)
    return Claim(config, fingerprints, objects=objects)


def _fingerprints(experiment: Experiment) -> dict[str, str]:
    """Of what is trained and validated on, and of what the objective brings. All processes must ask together."""
    resources = experiment.resources
    splits = {"train": resources.train, "val": resources.val, "unlabelled": resources.unlabelled}
    found = {split: source.fingerprint for split, source in splits.items() if source is not None}
    return found | objective_fingerprints(experiment)
