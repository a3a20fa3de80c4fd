"""A work directory while one run has it: its checkpoints, where to resume, and when to stop.

All processes of the run must see it, and no other run may have it.
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
from jaxddp.core.errors import InputError
from jaxddp.core.message import Option
from jaxddp.core.peers import ALONE, Peers
from jaxddp.job.preemption import stop_on_sigterm
from jaxddp.measure.profile import FOLDER
from jaxddp.recipe_file import CONFIG_FILE, COPY_FOLDER
from jaxddp.sections.goal import Goal
from jaxddp.training.checkpoints.integrity import ASIDE, CHECKPOINTS, INDEX, Integrity, steps_in
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.checkpoints.run_identity import RunIdentity
from jaxddp.training.run import Keeping, Run
from jaxddp.workdir.lock import LOCK_FILE, locked
from jaxddp.workdir.presence import staying
from jaxddp.workdir.signature import SIGNATURE_FILE

Resume = Literal["auto", "never", "must"]
_SHARED_SECONDS = 5
_BEGINNING = frozenset((CHECKPOINTS, CONFIG_FILE, COPY_FOLDER, LOCK_FILE, SIGNATURE_FILE))
"""What a work directory holds before there is anything to lose in it."""
_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Session:
    """What a run needs of its work directory; it begins anew where there is no step to resume.

    `check` sees that the directory is still there, with all that the run has made in it by then.
    """

    directory: Path
    checkpoints: Checkpoints
    resume_step: int | None = None
    should_stop: Callable[[int], bool] = lambda step: False
    check: Callable[[], None] = lambda: None

    @property
    def run_id(self) -> str | None:
        """Of the run that is resumed, as its checkpoint names it."""
        return None if self.resume_step is None else self.checkpoints.integrity.run_id(self.resume_step)

    def belongs_to(self, record: Mapping[str, Any]) -> None:
        """Mark the checkpoints that follow with the run that `record`, the content of config.json, names."""
        self.checkpoints.integrity.belong_to(RunIdentity.of(record))

    def joined(self, run: Run) -> Run:
        """The run in this work directory: it resumes there, saves there, and stops when asked.

        Raises: InputError; the checkpoint is another's, or of another step, or the directory has gone.
        """
        self.check()
        restored: dict[str, Any] = {}
        if self.resume_step is not None:
            state, progress = self.checkpoints.restore(self.resume_step, run.state)
            if (step := int(state.step)) != self.resume_step:
                raise InputError(
                    f"{self.checkpoints.directory / str(self.resume_step)}: holds the state of step {step}; move it "
                    "away, and the step before it is taken"
                )
            # As process 0 sees it: what it wrote last may not have come to every host.
            own = self.checkpoints.validations.of(self.resume_step)
            measured = json.loads(run.topology.peers.from_first("validated", lambda: json.dumps(own)))
            run, restored = replace(run, state=state), {"progress": progress, "validated": measured or None}
        self.checkpoints.validations.resume(self.resume_step or 0)
        profile = self.directory / FOLDER
        return replace(run, keeping=Keeping(self.checkpoints, self.should_stop, profile, **restored))


@contextmanager
def session(
    directory: Path, peers: Peers = ALONE, *, keep: int = 2, goal: Goal | None = None, resume: Resume = "auto"
) -> Iterator[Session]:
    """Hold a work directory for one run, with SIGTERM caught; at the end what is being written is finished.

    For `keep` and `goal` see `Checkpoints`. Raises: InputError; as `staying`, and where it cannot be had.
    """
    before = {*os.listdir(directory)} if directory.is_dir() else None
    check_shared(files.create(directory), peers)
    place = directory / CHECKPOINTS
    with held(directory, peers), withdrawn(directory, before, peers), staying(directory, peers) as check:
        if resume != "never":
            # Before Orbax counts the damaged ones among those that it keeps.
            peers.from_first("whole checkpoints", lambda: set_damaged_aside(place))
        with Checkpoints(place, peers, keep=keep, goal=goal) as checkpoints, stop_on_sigterm() as stop:

            def should_stop(step: int) -> bool:
                # Orbax would make it once more, to save there.
                check()
                return stop(step)

            yield Session(directory, checkpoints, resume_step(checkpoints, resume), should_stop, check)


def set_damaged_aside(place: Path) -> str:
    """Rename the checkpoints that are newer than the newest whole one, so that a run resumes from that one.

    Returns the names that they have now. A line names each, its step and the file that is damaged.

    Raises:
        InputError: there are checkpoints, and none is whole; then all stay as they are.
    """
    integrity, damaged = Integrity(place), {}
    if integrity.fault is not None:
        _log.warning(f"{place / INDEX}: {integrity.fault}; it is written anew from the manifests that are whole")
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
        aside = place / f"{each}{ASIDE}"
        with files.readable_errors(aside):
            if aside.exists():
                shutil.rmtree(aside)
            (place / str(each)).rename(aside)
        _log.warning(
            f"{place / str(each)}: step {each} is damaged: {fault}; the run resumes from step {step}, the newest that "
            f"is whole, and this one is kept as {aside.name}"
        )
    return " ".join(f"{each}{ASIDE}" for each in damaged)


def resume_step(checkpoints: Checkpoints, resume: Resume) -> int | None:
    """The step to go on from, the latest checkpoint's; None begins anew. Raises: InputError."""
    # As process 0 sees it: a network file system may show others an older one.
    seen = checkpoints.peers.exchange("latest checkpoint", str(checkpoints.latest()))[0]
    latest = None if seen == str(None) else int(seen)
    if resume == "must" and latest is None:
        raise InputError(
            f"{checkpoints.directory}: no checkpoint to resume from",
            advice=("check ", Option("workdir"), ", or --resume auto"),
        )
    if resume == "never" and latest is not None:
        raise InputError(
            f"{checkpoints.directory}: holds checkpoints up to step {latest}, which --resume never would lose",
            advice=("choose another ", Option("workdir"), ", remove it, or --resume auto"),
        )
    return latest


def check_shared(directory: Path, peers: Peers) -> None:
    """Raises `InputError` where a process does not see what process 0 writes: Orbax would wait for it without end."""
    name = peers.exchange("work directory", f".shared-{uuid.uuid4().hex}")[0]
    if peers.is_first:
        with files.readable_errors(directory):
            (directory / name).touch()
    peers.exchange("work directory written", "")
    # A network file system may show a new file a little late.
    give_up = time.monotonic() + _SHARED_SECONDS
    while not (seen := (directory / name).exists()) and time.monotonic() < give_up:
        time.sleep(0.1)
    all_saw = peers.exchange("work directory seen", str(seen))
    blind = [process for process, saw in enumerate(all_saw) if saw != str(True)]
    if peers.is_first:
        files.remove(directory / name)
    if blind:
        raise InputError(
            f"{directory}: process {blind[0]} does not see what process 0 writes there",
            advice=("give a ", Option("workdir"), " that all hosts share"),
        )


@contextmanager
def withdrawn(directory: Path, before: set[str] | None, peers: Peers) -> Iterator[None]:
    """Where a mistake ends a run that has logged and saved nothing, what its beginning wrote goes, but not what was
    there `before`; and the directory, if that was not there."""
    begins = peers.is_first and not (directory / CONFIG_FILE).exists()
    try:
        yield
    except InputError:
        with contextlib.suppress(OSError):
            written = {*os.listdir(directory)} - (before or set())
            if begins and written <= _BEGINNING and not os.listdir(directory / CHECKPOINTS):
                for entry in (directory / name for name in written):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                if before is None:
                    directory.rmdir()
        raise


@contextmanager
def held(directory: Path, peers: Peers = ALONE) -> Iterator[None]:
    """As `locked`, of a job: its first process has the lock."""
    if not peers.is_first:
        yield
        return
    with locked(directory):
        yield
