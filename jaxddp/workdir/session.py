"""The session of a run in its work directory: its lock, its checkpoints, the step to resume from, and the stop request.

The directory must be visible to all processes of the run, and no other run may use it.
"""

import contextlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Option
from jaxddp.core.peers import ALONE, Peers
from jaxddp.job.membership import stop_on_sigterm
from jaxddp.measure.profile import FOLDER
from jaxddp.recipe_file import COPY_FOLDER
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.sections.goal import Goal
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, DAMAGED_SUFFIX, INDEX, Integrity, RunIdentity, steps_in
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.run import Persistence, Run
from jaxddp.workdir.lock import LOCK_FILE, locked
from jaxddp.workdir.presence import watch_workdir
from jaxddp.workdir.shares_file import SHARES_FILE
from jaxddp.workdir.signature import SIGNATURE_FILE

Resume = Literal["auto", "never", "must"]
_SHARED_SECONDS = 5
_INITIAL_FILES = frozenset((CHECKPOINTS, CONFIG_FILE, COPY_FOLDER, LOCK_FILE, SHARES_FILE, SIGNATURE_FILE))
"""The files of a work directory before anything is logged or saved."""
_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Session:
    """The work directory of a run.

    Attributes:
        resume_step: the step to resume from; None for a new run.
        should_stop: returns whether the run was asked to stop.
        check: raises InputError if the directory was removed or replaced.
    """

    directory: Path
    checkpoints: Checkpoints
    resume_step: int | None = None
    should_stop: Callable[[int], bool] = lambda step: False
    check: Callable[[], None] = lambda: None

    @property
    def run_id(self) -> str | None:
        """The id of the run that is resumed, from its checkpoint."""
        return None if self.resume_step is None else self.checkpoints.integrity.run_id(self.resume_step)

    def set_identity(self, record: Mapping[str, Any]) -> None:
        """Write the id of the run into the manifests of later checkpoints. `record` is the content of config.json."""
        self.checkpoints.integrity.set_writer(RunIdentity.of(record))

    def restore_into(self, run: Run) -> Run:
        """Return the run with the state of its checkpoint, and with this directory to save to.

        Raises:
            InputError: the checkpoint is of another run or step, or the directory was removed.
        """
        self.check()
        restored: dict[str, Any] = {}
        if self.resume_step is not None:
            state, progress = self.checkpoints.restore(self.resume_step, run.state)
            if (step := int(state.step)) != self.resume_step:
                raise InputError(
                    f"{self.checkpoints.directory / str(self.resume_step)}: holds the state of step {step}; move it "
                    "away to use the step before"
                )
            # Process 0 reads the metrics, because other hosts may not see its last writes yet.
            metrics = self.checkpoints.validations.of(self.resume_step)
            measured = json.loads(run.topology.peers.from_first("validated", lambda: json.dumps(metrics)))
            run, restored = replace(run, state=state), {"progress": progress, "validated": measured or None}
        self.checkpoints.validations.resume(self.resume_step or 0)
        profile = self.directory / FOLDER
        return replace(run, persistence=Persistence(self.checkpoints, self.should_stop, profile, **restored))


@contextmanager
def session(
    directory: Path, peers: Peers = ALONE, *, keep: int = 2, goal: Goal | None = None, resume: Resume = "auto"
) -> Iterator[Session]:
    """Open a work directory for one run, and catch SIGTERM. At the end, wait until the last checkpoint is written.

    For `keep` and `goal` see `Checkpoints`.

    Raises:
        InputError: the directory cannot be used; see also `watch_workdir`.
    """
    before = {*os.listdir(directory)} if directory.is_dir() else None
    check_shared(files.create(directory), peers)
    place = directory / CHECKPOINTS
    with (
        lock_for_job(directory, peers),
        remove_failed_start(directory, before, peers),
        watch_workdir(directory, peers) as presence,
    ):
        if resume != "never":
            # Damaged checkpoints are renamed first, because Orbax would count them among the latest ones to keep.
            peers.from_first("whole checkpoints", lambda: rename_damaged(place))
        with Checkpoints(place, peers, keep=keep, goal=goal) as checkpoints, stop_on_sigterm() as stop:
            presence.saves = lambda: (checkpoints.last_saved, checkpoints.last_complete)

            def should_stop(step: int) -> bool:
                # If the directory was removed, Orbax would make it again and save there.
                presence.check()
                return stop(step)

            yield Session(directory, checkpoints, resume_step(checkpoints, resume), should_stop, presence.check)


def rename_damaged(place: Path) -> str:
    """Rename the damaged checkpoints after the last undamaged one, from which a run then resumes.

    Returns the new names. Each checkpoint is logged with its damaged file.

    Raises:
        InputError: there are checkpoints, and all are damaged; none is renamed.
    """
    integrity, damaged = Integrity(place), {}
    if integrity.fault is not None:
        _log.warning(f"{place / INDEX}: {integrity.fault}; it is rebuilt from the undamaged manifests")
    for step in reversed(steps_in(place)):
        if (fault := integrity.check(step)) is None:
            break
        damaged[step] = fault
    else:
        step = None
    if damaged and step is None:
        newest, fault = next(iter(damaged.items()))
        raise InputError(
            f"{place / str(newest)}: step {newest} is damaged: {fault}",
            advice=("no checkpoint there is whole, so restore the files, or start in another ", Option("workdir")),
        )
    for each, fault in damaged.items():
        renamed = place / f"{each}{DAMAGED_SUFFIX}"
        with files.readable_errors(renamed):
            if renamed.exists():
                shutil.rmtree(renamed)
            (place / str(each)).rename(renamed)
        _log.warning(
            f"{place / str(each)}: step {each} is damaged: {fault}; the run resumes from step {step}, the latest "
            f"undamaged one, and this one is kept as {renamed.name}"
        )
    return " ".join(f"{each}{DAMAGED_SUFFIX}" for each in damaged)


def resume_step(checkpoints: Checkpoints, resume: Resume) -> int | None:
    """Return the step of the latest checkpoint; None for a new run.

    Raises:
        InputError: `resume` is "must", but there is no checkpoint; or it is "never", but there is one.
    """
    # Process 0 decides, because a network file system may show an older checkpoint to the others.
    first = checkpoints.peers.exchange("latest checkpoint", str(checkpoints.latest()))[0]
    latest = None if first == str(None) else int(first)
    if resume == "must" and latest is None:
        raise InputError(
            f"{checkpoints.directory}: no checkpoint to resume from",
            advice=("check ", Option("workdir"), ", or --resume auto"),
        )
    if resume == "never" and latest is not None:
        raise InputError(
            f"{checkpoints.directory}: has checkpoints up to step {latest}; a new run (--resume never) would lose them",
            advice=("choose another ", Option("workdir"), ", remove it, or --resume auto"),
        )
    return latest


def check_shared(directory: Path, peers: Peers) -> None:
    """Raise `InputError` if a process does not see process 0's files, for which Orbax would wait forever."""
    name = peers.exchange("work directory", f".shared-{uuid.uuid4().hex}")[0]
    if peers.is_first:
        with files.readable_errors(directory):
            (directory / name).touch()
    peers.exchange("work directory written", "")
    # A network file system may show a new file with a delay.
    give_up = time.monotonic() + _SHARED_SECONDS
    while not (seen := (directory / name).exists()) and time.monotonic() < give_up:
        time.sleep(0.1)
    all_saw = peers.exchange("work directory seen", str(seen))
    without_access = [process for process, saw in enumerate(all_saw) if saw != str(True)]
    if peers.is_first:
        files.remove(directory / name)
    if without_access:
        raise InputError(
            f"{directory}: process {without_access[0]} does not see what process 0 writes there",
            advice=("give a ", Option("workdir"), " that all hosts share"),
        )


@contextmanager
def remove_failed_start(directory: Path, before: set[str] | None, peers: Peers) -> Iterator[None]:
    """If an input error ends a new run before it logs or saves, remove the files that it wrote.

    Files that existed `before` stay. The directory is removed if it did not exist before.
    """
    is_new = peers.is_first and not (directory / CONFIG_FILE).exists()
    try:
        yield
    except InputError:
        with contextlib.suppress(OSError):
            written = {*os.listdir(directory)} - (before or set())
            if is_new and written <= _INITIAL_FILES and not os.listdir(directory / CHECKPOINTS):
                for entry in (directory / name for name in written):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                if before is None:
                    directory.rmdir()
        raise


@contextmanager
def lock_for_job(directory: Path, peers: Peers = ALONE) -> Iterator[None]:
    """Lock a work directory for a job. Process 0 holds the lock; see `locked`."""
    if not peers.is_first:
        yield
        return
    with locked(directory):
        yield
