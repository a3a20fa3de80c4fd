"""The session of a run in its work directory: its lock, its checkpoints, the step to resume from, and the stop request.

The directory must be visible to all processes of the run, and no other run may use it. The run ends if the directory is
removed, moved or replaced, so that it does not save into a wrong directory.
"""

import errno
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jax.tree_util import tree_leaves_with_path

import jaxddp.core.files as files
import jaxddp.training.checkpoints.integrity as integrity
from jaxddp.config.goal import Goal
from jaxddp.core.errors import InputError, Option
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import COMMIT, progress
from jaxddp.core.process_exit import end_now
from jaxddp.job.membership import stop_on_signals
from jaxddp.measure.profile import FOLDER
from jaxddp.models.interface import path_of
from jaxddp.recipe.file import COPY_FOLDER, REFERENCE_FILE
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.setup.identity import checksum
from jaxddp.setup.measured_shares import SHARES_FILE
from jaxddp.training.checkpoints.manager import UNFINISHED_SUFFIX, Checkpoints
from jaxddp.training.listeners import jsonl
from jaxddp.training.run import Run
from jaxddp.weights.places import SIGNATURE_FILE
from jaxddp.workdir.lock import LOCK_FILE, locked

Resume = Literal["auto", "never", "must"]
_SHARED_SECONDS = 5
_INITIAL_FILES = frozenset((integrity.CHECKPOINTS, CONFIG_FILE, COPY_FOLDER, LOCK_FILE, SHARES_FILE, SIGNATURE_FILE))
_INITIAL_FILES |= {REFERENCE_FILE}
"""The files of a work directory before anything is logged or saved."""
_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Session:
    """The work directory of a run.

    Attributes:
        resume_step: the step to resume from; None for a new run.
        should_stop: returns whether the run was asked to stop.
    """

    directory: Path
    checkpoints: Checkpoints
    resume_step: int | None = None
    should_stop: Callable[[int], bool] = lambda step: False

    def restore_into(self, run: Run) -> Run:
        """Return the run with the state of its checkpoint, and this directory to save to; see `Checkpoints.restore`.

        Raises: InputError if the state of the run is trained, and is not that of the checkpoint or an earlier one, or
            if it has an array without elements.
        """
        restored: dict[str, Any] = {}
        # Orbax would raise an error at the first checkpoint.
        if empty := [path for path, leaf in tree_leaves_with_path(run.state) if not leaf.size]:
            raise InputError(f"{path_of(empty[0])}: cannot be saved without elements", advice="use another optimizer")
        if self.resume_step is not None:
            state, progress = self.checkpoints.restore(self.resume_step, run.state)
            # Python may give a trained state. A stacked one was averaged, and rounded.
            is_compared = 0 < (step := int(run.state.step)) == self.resume_step and run.state.stacked is None
            is_other = is_compared and checksum(run.state.params) != checksum(state.params)
            if is_other or step > self.resume_step:
                problem = f"state: it is not that of step {self.resume_step:,} in {self.directory}"
                raise InputError(problem, advice=("leave it out, or give another ", Option("workdir")))
            # Process 0 reads the metrics, because other hosts may not see its last writes yet.
            metrics = self.checkpoints.validations.by_step.get(self.resume_step, {})
            measured = run.topology.peers.from_first("validated", lambda: metrics)
            restored = {"state": state, "progress": progress, "validated": measured or None}
        self.checkpoints.validations.resume(self.resume_step or 0)
        restored |= {"checkpoints": self.checkpoints, "should_stop": self.should_stop}
        return replace(run, profile=self.directory / FOLDER, **restored)


@contextmanager
def session(
    directory: Path, peers: Peers = ALONE, *, keep: int = 2, goal: Goal | None = None, resume: Resume = "auto"
) -> Iterator[Session]:
    """Open a work directory for one run, and catch signals. At the end, wait until the last checkpoint is written.

    For `keep` and `goal` see `Checkpoints`. Raises: InputError if the directory is unusable; see also `watch_workdir`.
    """
    before = {*os.listdir(directory)} if directory.is_dir() else None
    check_shared(directory, peers)
    place = directory / integrity.CHECKPOINTS
    with (
        locked(directory) if peers.is_first else nullcontext(),
        remove_failed_start(directory, before, peers),
        watch_workdir(directory, peers) as presence,
    ):
        if resume != "never":
            # Damaged checkpoints are renamed first, because Orbax would count them among the latest ones to keep.
            peers.from_first("whole checkpoints", lambda: rename_damaged(place))
        with Checkpoints(place, peers, keep=keep, goal=goal) as checkpoints, stop_on_signals() as stop:
            presence.saves = lambda: (checkpoints.last_saved, checkpoints.last_complete)

            def should_stop(step: int) -> bool:
                # If the directory was removed, Orbax would make it again and save there.
                presence.check()
                return stop(step)

            yield Session(directory, checkpoints, resume_step(checkpoints, resume), should_stop)


def rename_damaged(place: Path) -> str:
    """Rename the damaged checkpoints after the last undamaged one, from which a run then resumes.

    Returns the new names. Each checkpoint is logged with its damaged file. Raises: InputError if there are checkpoints,
    and all are damaged; none is renamed.
    """
    manifests, steps = integrity.Integrity(place), integrity.steps_in(place)
    damaged = dict[int, str]()
    if manifests.fault is not None:
        _log.warning(f"{place / integrity.INDEX}: {manifests.fault}; it is rebuilt from the undamaged manifests")
    while steps and (fault := manifests.check(steps[-1])) is not None:
        damaged[steps.pop()] = fault
    if damaged and not steps:
        newest, fault = next(iter(damaged.items()))
        advice = ("no checkpoint there is whole, so restore the files, or start in another ", Option("workdir"))
        raise InputError(f"{place / str(newest)}: step {newest} is damaged: {fault}", advice=advice)
    for each, fault in damaged.items():
        renamed = place / f"{each}{integrity.DAMAGED_SUFFIX}"
        with files.readable_errors(renamed):
            shutil.rmtree(renamed, ignore_errors=True)
            (place / str(each)).rename(renamed)
        then = f"the run resumes from step {steps[-1]}, the latest whole one, and this one is kept as {renamed.name}"
        _log.warning(f"{place / str(each)}: step {each} is damaged: {fault}; {then}")
    return " ".join(f"{each}{integrity.DAMAGED_SUFFIX}" for each in damaged)


def resume_step(checkpoints: Checkpoints, resume: Resume) -> int | None:
    """Return the step of the latest checkpoint; None for a new run.

    Raises: InputError if `resume` is "must", but there is no checkpoint; or it is "never", but there is one.
    """
    # Process 0 decides, because a network file system may show an older checkpoint to the others.
    latest = checkpoints.peers.exchange("latest checkpoint", checkpoints.latest())[0]
    if resume == "must" and latest is None:
        advice = ("check ", Option("workdir"), ", or --resume auto")
        raise InputError(f"{checkpoints.directory}: no checkpoint to resume from", advice=advice)
    if resume == "never" and latest is not None:
        advice = ("choose another ", Option("workdir"), ", remove it, or --resume auto")
        problem = f"has checkpoints up to step {latest}; a new run (--resume never) would lose them"
        raise InputError(f"{checkpoints.directory}: {problem}", advice=advice)
    return latest


def check_shared(directory: Path, peers: Peers) -> None:
    """Create a directory. Raises: InputError if a process cannot write there, or does not see process 0's files."""
    is_new = not directory.is_dir()
    place = files.create(directory) / peers.exchange("work directory", f".shared-{uuid.uuid4().hex}")[0]
    if peers.is_first:
        with files.readable_errors(directory):
            place.touch()
    peers.exchange("work directory written", "")
    # A network file system may show a new file with a delay.
    give_up = time.monotonic() + _SHARED_SECONDS
    while not (seen := place.exists()) and time.monotonic() < give_up:
        time.sleep(0.1)
    # Orbax would wait for files that a process does not see. A host may have mounted the directory read-only.
    fault = f"process {peers.process_index} {'cannot write' if seen else 'does not see what process 0 writes'} there"
    faults = peers.exchange("work directory seen", "" if seen and os.access(directory, os.W_OK) else fault)
    if peers.is_first:
        files.remove(place)
    if fault := next(filter(None, faults), ""):
        if is_new:
            with suppress(OSError):
                directory.rmdir()
        raise InputError(f"{directory}: {fault}", advice=("give a ", Option("workdir"), " that all hosts share"))


@contextmanager
def remove_failed_start(directory: Path, before: set[str] | None, peers: Peers) -> Iterator[None]:
    """If an input error ends a new run before it logs or saves, remove the files that it wrote.

    Files that existed `before` stay. The directory is removed if it did not exist before.
    """
    is_new = peers.is_first and not (directory / CONFIG_FILE).exists()
    try:
        yield
    except InputError:
        with suppress(OSError):
            written = {*os.listdir(directory)} - (before or set())
            if is_new and written <= _INITIAL_FILES and not os.listdir(directory / integrity.CHECKPOINTS):
                for name in written:
                    (shutil.rmtree if (directory / name).is_dir() else os.unlink)(directory / name)
                if before is None:
                    directory.rmdir()
        raise


_POLL_SECONDS = 1.0
_EXIT_SECONDS = 10.0
"""Seconds that the training thread has to end before the process exits. It may be waiting for an ended process."""
_REMOVING_SECONDS = 1.0
_REMOVALS, _REMOVAL_INTERVAL = 5, 0.05
"""The number of attempts to remove a directory, which other threads may make again, and the seconds between them."""
_OF_A_RUN = frozenset((jsonl.METRICS, jsonl.RESULT, jsonl.CURVES, jsonl.CONFUSION, jsonl.FILE))
"""Files that a run may write again after a removal, and that are useless without its other files."""
_GONE = frozenset((errno.ENOENT, errno.ENOTDIR))


class Presence:
    """The device and inode of a work directory, of its folder of checkpoints and of its config.json.

    Attributes:
        saves: returns the last step that this process saved, and the last complete one; None where there is none.
        kept_open: closes the directories that the object keeps open.
    """

    def __init__(self, directory: Path):
        self.saves: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)
        self._complete: int | None = None
        self._paths = (directory, directory / integrity.CHECKPOINTS, directory / CONFIG_FILE)
        self._identities: dict[Path, tuple[int, int]] = {}
        self.kept_open = ExitStack()
        self.fault()

    def check(self) -> None:
        """Raise `InputError` if the directory was removed, moved or replaced. It is called after each step."""
        if (fault := self.fault()) is not None:
            raise InputError(fault)
        _, self._complete = self.saves()

    def fault(self) -> str | None:
        """Return an error message about a removed or replaced path; None if all paths are unchanged or unreachable."""
        for place in self._paths:
            try:
                identity = _identity(place)
            except OSError as error:
                is_gone = error.errno in _GONE and place in self._identities
            else:
                if place not in self._identities:
                    # File systems such as gcsfuse give a directory a new inode when no process has it open.
                    with suppress(OSError):
                        self.kept_open.callback(os.close, os.open(place, os.O_RDONLY | os.O_DIRECTORY))
                is_gone = self._identities.setdefault(place, identity) != identity
            if is_gone:
                advice = f"bring {self._paths[0]} back, and the same command resumes there"
                return f"{place}: was removed, moved or replaced while the run wrote there; {advice}"
        return None

    def fault_after(self, error: BaseException) -> str | None:
        """Return the message of `fault` after an error.

        If a file is missing, an `rm -r` may be running. So wait up to a second until the directory is gone, too.
        """
        cause, give_up = error.__cause__ or error, time.monotonic() + _REMOVING_SECONDS
        is_gone = isinstance(cause, OSError) and cause.errno in _GONE
        while (fault := self.fault()) is None and is_gone and time.monotonic() < give_up:
            time.sleep(_REMOVING_SECONDS / 20)
        return fault

    def remove_recreated(self) -> None:
        """Remove directories that a save made again. The next run would take them for a work directory.

        Orbax and TensorStore make the parent folders of each file that they write. Until the next step checks the
        directory, the run itself may write there, too.
        """
        directory, checkpoints, config = self._paths
        for _ in range(_REMOVALS):
            with suppress(OSError):
                known = {integrity.INDEX, integrity.VALIDATION_FILE}
                saved, _ = self.saves()
                # A checkpoint that was complete before the removal, or one beside a config.json, is a copy of the user.
                if saved != self._complete and not config.exists():
                    known.add(str(saved))
                names = {name for name in os.listdir(checkpoints) if UNFINISHED_SUFFIX not in name}
                if self._is_new(checkpoints) and names <= known:
                    shutil.rmtree(checkpoints, ignore_errors=True)
            with suppress(OSError):
                if self._is_new(directory) and {*os.listdir(directory)} <= _OF_A_RUN:
                    shutil.rmtree(directory)
            time.sleep(_REMOVAL_INTERVAL)

    def _is_new(self, place: Path) -> bool:
        return _identity(place) != self._identities.get(place)


def _identity(place: Path) -> tuple[int, int]:
    """Return the device and inode of a directory; (0, 0) for config.json, whose inode changes when it is written."""
    status = os.stat(place)
    return (0, 0) if place.name == CONFIG_FILE else (status.st_dev, status.st_ino)


@contextmanager
def watch_workdir(directory: Path, peers: Peers = ALONE) -> Iterator[Presence]:
    """Watch a work directory during the block. The training thread calls `check` of the `Presence` that is yielded.

    If the directory is removed, moved or replaced, any error in the block becomes an InputError about this. The process
    exits if the block does not end within 10 seconds, because the block may wait for another process.
    """
    presence, finished = Presence(directory), threading.Event()

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            if presence.fault() is None or finished.wait(_EXIT_SECONDS):
                continue
            # A single process waits for no other process. But the threads of Orbax wait for each other, up to an hour.
            may_wait = not peers.is_alone or progress().phase in ("save", COMMIT)
            # The check is repeated, because a file server may have shown an older state.
            if may_wait and (fault := presence.fault()) is not None:
                peers.abandon(fault, InputError.exit_code)
                end_now(fault, InputError.exit_code)

    threading.Thread(target=watch, name="jaxddp-workdir", daemon=True).start()
    try:
        yield presence
    except Exception as error:
        if (fault := presence.fault_after(error)) is not None:
            presence.remove_recreated()
            raise InputError(fault) from error
        raise
    finally:
        finished.set()
        presence.kept_open.close()
