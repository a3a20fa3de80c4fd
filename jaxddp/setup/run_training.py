"""Trains a run, for `jaxddp train` with a recipe file and for `jaxddp.train` with a setup, and makes its `Run`."""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config.registry import METRICS, OPTIMIZERS
from jaxddp.core.errors import InputError, Key, Option, size
from jaxddp.core.files import reading
from jaxddp.core.peers import Peers
from jaxddp.core.phases import phase
from jaxddp.data.formats.packed_records import MANIFEST
from jaxddp.data.storage.root import is_url
from jaxddp.data.united import own_part, warn_of_validation
from jaxddp.engine.replicas import Replicas
from jaxddp.engine.state import TrainState
from jaxddp.job.environment import report_work
from jaxddp.models.interface import name_of
from jaxddp.recipe.file import CALLED, RUN_ID
from jaxddp.schedules import derivation
from jaxddp.setup.identity import checksums, identity
from jaxddp.setup.measured_shares import settle_shares
from jaxddp.setup.network_checks import dtypes_of_products
from jaxddp.setup.recipe import Recipe, method_of
from jaxddp.setup.run_setup import RunSetup, check_state, initialize
from jaxddp.setup.user_objects import check_listeners, check_requested_metrics, objects_of_hooks
from jaxddp.training.checkpoints.integrity import RunIdentity
from jaxddp.training.evaluation import Evaluator, Measure, describe_non_finite
from jaxddp.training.events import Description
from jaxddp.training.listeners.jsonl import SlowProcesses
from jaxddp.training.listeners.notifier import make_loggers
from jaxddp.training.loop import fit
from jaxddp.training.run import Run
from jaxddp.workdir.claim import Claim, claim, compare, describe_end
from jaxddp.workdir.session import Resume, session
from jaxddp.workdir.signature import Signature


@report_work()
@phase("start")
def train(
    recipe: Recipe, directory: Path | None, resume: Resume = "auto", listeners: Sequence[Any] = (), evaluators: Any = ()
) -> TrainState | None:
    """Train a recipe of a file, or a setup of the Python API, which is not changed. Return the last state.

    Args:
        evaluators: functions of the state that return further metrics of a validation; a sequence of `Measure`.

    With a directory, start or resume the run in it, and save, validate and log as configured. After SIGTERM or
    Ctrl-C, the run saves and stops. Without a directory nothing is saved.

    If the run of a recipe file has already ended with the same length, print what it reached and return None. The state
    of a setup whose run has ended is restored.

    Raises:
        InputError, NonFiniteError, ReplicaError, GradientError, Preempted: see `jaxddp.core.errors`.
    """
    peers, config = recipe.topology.peers, recipe.config
    claimed = claim_of(recipe, directory)
    if directory is None:
        return fit(make_run(settle_shares(_begin(recipe, resumes=False)), listeners, evaluators, claimed.record()))
    # The user's code may change the current directory.
    with reading(directory, "go to another directory, or give an absolute path"):
        directory = directory.absolute()
    with session(directory, peers, keep=config.checkpoint.keep, goal=recipe.goal, resume=resume) as opened:
        done, total = opened.resume_step, recipe.layout.plan.total_steps
        resumes = done is not None
        signature = Signature.of(recipe.resources.train, config.data)
        if done is not None:
            signature.check_resumed(directory)
            if done > total:
                compare(directory, claimed, peers)  # Another batch size also leads to another number of steps.
                problem = f": ends at step {total:,}, and {directory} was trained for {done:,} steps"
                advice = "give more, or start in another ", Option("workdir")
                raise InputError(Key("train.duration", str(config.train.duration)), problem, advice=advice)
        record, is_same = claim(directory, claimed, peers, resuming=resumes, ended=done == total)
        if not resumes:
            opened.checkpoints.integrity.run = RunIdentity.of(record)
        if ended := describe_end(directory, done, peers, is_same=is_same and recipe.file is not None):
            _print(ended, peers)
            return None
        all_listeners = [*listeners, *make_loggers(config, directory)]
        # Only the first process calls listeners.
        hooks = recipe.file.hooks if recipe.file is not None and peers.is_first else {}
        if (custom := objects_of_hooks(hooks)("listeners", config, directory)) is not None:
            all_listeners += check_listeners(custom.value, custom.where)
        setup = settle_shares(_begin(recipe, resumes=resumes), directory, record[RUN_ID], resumes=resumes)
        run = make_run(setup, all_listeners, evaluators, record)
        if peers.is_first:
            signature.write(directory, record[RUN_ID])
        return fit(opened.restore_into(run))


def _begin(recipe: Recipe, *, resumes: bool) -> RunSetup:
    """Initialize the network of a recipe, or copy the state of a setup, because a run consumes its state.

    In a run that `resumes`, a checkpoint replaces the state. Raises: InputError if the state of a setup does not fit
    its model and optimizer, or no steps are left to train.
    """
    if isinstance(recipe, RunSetup):
        check_state(recipe.state, recipe, to_train=True)
        done, total = int(recipe.state.step), recipe.layout.plan.total_steps
        if not resumes and done >= total:
            problem = f"state: it is at step {done}, and {recipe.config.train.duration} end at step {total}"
            raise InputError(problem, advice="give more epochs")
        return dataclasses.replace(recipe, state=jax.tree.map(jnp.copy, recipe.state))
    setup = initialize(recipe, fresh=not resumes)
    _print(derivation(recipe.config), recipe.topology.peers)
    return setup


def _print(line: str | None, peers: Peers) -> None:
    if line and peers.is_first:
        print(line, flush=True)


def claim_of(recipe: Recipe, directory: Path | None) -> Claim:
    """Return the claim of a run. All processes must call this function together.

    The claim of a setup has digests of its model, loss, optimizer and so on in place of the settings that name them.
    They are compared with a resumed run, and between processes.
    """
    resources, settings = recipe.resources, recipe.config.to_dict()
    splits = {"train": resources.train, "val": resources.val, "unlabelled": resources.unlabelled}
    fingerprints = {split: source.fingerprint for split, source in splits.items() if source is not None}
    # An objective may load objects, such as a teacher.
    if (method := method_of(recipe.objective, "fingerprints")) is not None:
        loaded = method(recipe)
        recipe.topology.peers.agree({f"objective's {name}": value for name, value in loaded.items()})
        fingerprints |= loaded
    if not isinstance(recipe, RunSetup):
        return Claim(settings, fingerprints, recipe.file)
    # Each call of `train` may have other validation data.
    fingerprints.pop("val", None)
    train = {key: settings["train"][key] for key in _TRAIN_KEYS}
    config = {"seed": settings["seed"], "data": settings["data"], "train": train}
    config["parallel"] = {"reproducible": settings["parallel"]["reproducible"]}
    is_compared = directory is not None or not recipe.topology.peers.is_alone
    return Claim(config, fingerprints, objects=identity(recipe) if is_compared else {})


_TRAIN_KEYS = ["batch_size", "duration", "gradient_precision", "precision"]
_TRAIN_KEYS += ["sync_every", "outer_optimizer", "outer_rate", "outer_momentum"]
"""The keys of `train` that config.json holds of a setup."""


def make_run(setup: RunSetup, listeners: Sequence[Any] = (), evaluators: Sequence[Any] = (), record: Any = None) -> Run:
    """Make the run of a setup. The run consumes the setup's state. It saves nothing by itself; see
    `jaxddp.workdir.session`.

    Args:
        evaluators: functions of the state that return further metrics of a validation.
        record: the content of config.json, a dict, for the listeners. All processes must have the same `objects` there.
    """
    plan, topology, resident = setup.layout.plan, setup.topology, setup.config.data.cache == "device"
    if not (peers := topology.peers).is_alone:
        objects, whole = (record or {}).get("objects", {}), checksums(setup.way.whole(setup.state))
        peers.agree({**objects, **whole, "the number of steps": str(plan.total_steps)})
        listeners = [*listeners, SlowProcesses(peers)]
    evaluator = _evaluator(setup, listeners, evaluators)
    if resident:
        # Place the data sets before compilation, so that a lack of memory or a damaged image is reported early.
        setup.feed.place(setup.validated)
    early_stopping = setup.early_stopping(has_further_metrics=bool(evaluators))
    with phase("compile", "preparing the step"):
        program, chunks = setup.program()
        # Errors in the step are raised before any listener is called.
        feed = next(chunks(0)).feed if resident else (setup.feed.abstract_batch(), setup.key)
        state = setup.way.placed(setup.state)
        jaxpr = program.check(state, *feed)
    # A recipe's optimizer may have a rate of its own, which is not known.
    hook = setup.file and setup.file.hooks.get(OPTIMIZERS.hook)
    rate = None if hook and CALLED not in hook.read else setup.learning_rate

    def suspects(state: TrainState, step: int) -> str:
        batch, rows = next(setup.feed.batches(step - 1, step)), setup.feed.rows(step - 1)
        return describe_non_finite(state, batch, rows, setup.supervised, setup.topology, setup.key)

    # The listeners of process 0 decide how many predictions are made, and all processes compute them.
    wanted = [getattr(listener, "wants_predictions", 0) for listener in listeners]
    max_predictions = peers.from_first("predictions", lambda: max(wanted, default=0))
    return Run(
        plan=plan,
        topology=topology,
        state=state,
        way=setup.way,
        program=program,
        chunks=chunks,
        division=setup.layout.division,
        parts=setup.parts,
        follow=setup.programs(setup.way.follow, setup.parts),
        own_statistics=setup.own_statistics(),
        # As one program: a schedule has a dozen operations, each of which would be compiled and run alone.
        learning_rate=rate and jax.jit(rate),
        growth=setup.feed.growing(plan.total_steps),
        self_test=setup.self_test(),
        replicas=Replicas(setup.way) if topology.num_devices > 1 and plan.replicas.examples else None,
        suspects=suspects,
        evaluator=evaluator,
        predictor=setup.predictor(max_predictions),
        early_stopping=early_stopping,
        description=describe(setup, jaxpr),
        listeners=listeners,
        record=record or {},
        class_names=() if setup.loss.labels.form == "numbers" else setup.resources.train.class_names,
    )


def describe(setup: RunSetup, jaxpr: Any) -> Description:
    """Return a run in words; `jaxpr` is that of a step."""
    model, val = setup.model, setup.validated
    name = name_of(getattr(model, "module", getattr(model, "function", model))).removesuffix(".__call__")
    if setup.file is not None and "get_model" not in setup.file.hooks:
        name = setup.config.model.name
    name = name.rpartition("<locals>.")[2]
    # The shares of dtypes in the products of the step, the largest first; below 0.5% they are not the network's.
    for index, (dtype, share) in enumerate(dtypes_of_products(jaxpr).items()):
        if share >= _LEAST_SHARE:
            name += f", {share:.0%} of its products in {dtype}" if index else f" in {dtype}"
    sources = setup.resources.train, val
    data, validation = ("" if each is None else getattr(own_part(each), "reading", "") for each in sources)
    if val is not None and setup.config.data.held_out is not None:
        fold, share = setup.config.data.fold, setup.config.data.val_share
        validation = f"fold {fold}" if share is None else f"{share:.0%} held out"
    # The examples of arrays have numbers in place of paths.
    if val is not None and not validation and "/" in (first := val.name(0)):
        validation = f"the first is {first}"
    return Description(name, data or setup.config.data.path or setup.config.data.name or "", validation, *_helps(setup))


def _helps(setup: RunSetup) -> tuple[str, str]:
    """Return what helps if steps wait for images: if the cores are busy, and if they are not; "" for nothing."""
    source, data, path = setup.resources.train, setup.config.data, setup.config.data.path or ""
    both, decoding, reading = list[str](), ["more cores"], ["a faster disk"]
    if own_part(source).pixel_shape is not None:
        decoding = reading = []
    elif is_url(path):
        reading = [] if data.local_cache else ["data.local_cache"]
    with suppress(InputError):
        source.check_resident(data)
        needed, free = sum(setup.feed.resident_bytes(setup.validated).values()), setup.topology.free_memory()
        if data.placement == "shared" and needed < (free or _FREE) / 2:
            both.append(f"data.cache=device ({size(needed)})")
    if decoding and not os.path.isfile(os.path.join(path, MANIFEST)):
        both.append("`jaxddp data pack` (smaller images, few files)")
    return ", ".join([*both, *decoding]), ", ".join([*both, *reading])


def _evaluator(setup: RunSetup, listeners: Sequence[Any], evaluators: Sequence[Measure]) -> Evaluator | None:
    """Return the evaluator of the validation data; None if validation is disabled."""
    val, config, peers = setup.validated, setup.config, setup.topology.peers
    if val is None:
        return None
    check_requested_metrics(listeners, setup.layout.training_data.labels)
    # The metrics that the listeners of process 0 request.
    requested = {name for listener in listeners for name in getattr(listener, "wants_metrics", ())}
    names = peers.from_first("metrics of listeners", lambda: sorted(requested))
    setup = dataclasses.replace(setup, metrics={name: METRICS.get(name) for name in names} | dict(setup.metrics))
    measured = setup.evaluator(val, config.eval.batch_size, resident=config.data.cache == "device")
    if peers.is_first:
        warn_of_validation(val, setup.resources.train, config.data.of_evaluation)
    return dataclasses.replace(measured, extra=evaluators)


_LEAST_SHARE = 0.005
_FREE = 4 << 30
"""Bytes that are assumed to be free on a device that does not report them."""
