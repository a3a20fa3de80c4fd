"""A work directory while one run has it: its checkpoints, where to resume, and when to stop."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jaxddp.files as files
from jaxddp.errors import InputError
from jaxddp.experiment.lock import check_shared, held
from jaxddp.job.membership import exchange
from jaxddp.job.preemption import stop_on_sigterm
from jaxddp.measure.profile import FOLDER
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.run import Position, Run

Resume = Literal["auto", "never", "must"]
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Session:
    """What a run needs of its work directory.

    Attributes:
        resume_step: the checkpoint to go on from; None begins anew.
        should_stop: see `Run`.
    """

    directory: Path
    checkpoints: Checkpoints
    resume_step: int | None = None
    should_stop: Callable[[int], bool] = lambda step: False

    def joined(self, run: Run) -> Run:
        """The run in this work directory: it resumes there, saves there, and stops when asked."""
        position = run.position
        if self.resume_step is not None:
            state, progress = self.checkpoints.restore(self.resume_step, position.state)
            # As process 0 sees it: what it wrote last may not have come to every host.
            validated = exchange("validated", str(self.checkpoints.is_validated(self.resume_step)))[0] == str(True)
            position = Position(state, progress, validated)
        return dataclasses.replace(
            run,
            position=position,
            checkpoints=self.checkpoints,
            should_stop=self.should_stop,
            profile=self.directory / FOLDER,
        )


@contextmanager
def session(directory: Path, *, keep: int = 2, resume: Resume = "auto") -> Iterator[Session]:
    """Hold a work directory for one run, with SIGTERM caught; what is being written is finished at the end.

    Raises:
        InputError: another run has it, it is not shared by all processes, or `resume` does not fit what is there.
    """
    check_shared(files.create(directory))
    with (
        held(directory),
        Checkpoints(directory / CHECKPOINTS, keep=keep) as checkpoints,
        stop_on_sigterm() as stop,
    ):
        yield Session(directory, checkpoints, resume_step(checkpoints, resume), stop)


def resume_step(checkpoints: Checkpoints, resume: Resume) -> int | None:
    """The step to go on from; None begins anew.

    Raises:
        InputError: "must" without a checkpoint, or "never" where one would be lost.
    """
    latest = latest_step(checkpoints)
    if resume == "must" and latest is None:
        raise InputError(f"{checkpoints.directory}: no checkpoint to resume from; check --workdir, or --resume auto")
    if resume == "never" and latest is not None:
        raise InputError(
            f"{checkpoints.directory}: holds checkpoints up to step {latest}, which --resume never would lose; "
            "choose another --workdir, remove it, or --resume auto"
        )
    return latest


def latest_step(checkpoints: Checkpoints) -> int | None:
    """The step of the latest checkpoint as process 0 sees it: a network file system may show others an older one."""
    seen = exchange("latest checkpoint", str(checkpoints.latest()))[0]
    return None if seen == str(None) else int(seen)
