"""Decides what follows when all processes of a job have ended: the end, or another start."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxddp.core.errors import InputError, Preempted

LONGEST_DELAY = 60.0
LONG_RUN = 600.0
"""If a start lasts this long, in seconds, the delays begin again from the shortest."""
PREEMPTED, BAD_INPUT = Preempted.exit_code, InputError.exit_code
STOPPED_BEFORE_TRAINING = 128 + signal.SIGTERM
"""The exit code of a process that was asked to save before it had begun to train."""


@dataclass(frozen=True)
class End:
    """How the processes of a machine ended.

    Attributes:
        code: 0; the exit code of the first process that failed, or 128 plus its signal; 75 if they were asked to stop,
            and saved.
        cause: which process failed, and how; or which signal the launcher received.
        asked: whether the launcher received a signal.
        quits: whether the user's code ended a process, and would do so again after a restart.
    """

    code: int
    cause: str
    asked: bool = False
    quits: bool = False


@dataclass(frozen=True)
class Budget:
    """The restarts of a job.

    Attributes:
        most: how many restarts are allowed.
        used: how many restarts there were.
        in_a_row: how many failures have followed each other closely.
    """

    most: int
    used: int = 0
    in_a_row: int = 0

    def after_failure(self, seconds: float) -> "Budget | None":
        """Return the budget after a start that failed after so many seconds; None if no restart is left."""
        if self.used == self.most:
            return None
        return replace(self, used=self.used + 1, in_a_row=1 if seconds >= LONG_RUN else self.in_a_row + 1)

    @property
    def delay(self) -> float:
        """Seconds before the next start: 1, 2, 4 and so on, at most 60."""
        # A float cannot hold a power of two beyond 2**1023.
        return min(2.0 ** min(self.in_a_row - 1, 10), LONGEST_DELAY) if self.in_a_row else 0.0


@dataclass(frozen=True)
class Restart:
    """The job starts again after `delay` seconds, with the budget that is left; `line` tells the user why."""

    budget: Budget
    delay: float
    line: str


def decide(
    ends: Mapping[int, End],
    failure: End | None,
    budget: Budget,
    seconds: float,
    *,
    elastic: bool = False,
    growing: bool = False,
) -> int | Restart:
    """Return what follows a start that ended: the exit code of the job, or another start.

    Args:
        ends: how the processes of each machine ended, by the machine's number.
        failure: the first failure on any machine; None if nothing failed.
        seconds: how long the processes ran.
        elastic: whether the job continues without a machine that was asked to stop, unless it is machine 0.
        growing: whether all processes were asked to save and stop, so that the next start has more machines.
    """
    if all(end.code == 0 for end in ends.values()):
        return 0
    leaving = [machine for machine, end in ends.items() if end.asked]
    code = PREEMPTED if failure is None else failure.code
    if code == BAD_INPUT or any(end.quits for end in ends.values()) or (leaving and (0 in leaving or not elastic)):
        return code
    if leaving:
        names = " and ".join(f"machine {machine}" for machine in sorted(leaving))
        return Restart(replace(budget, in_a_row=0), 0.0, f"{names} left; the others go on")
    if growing and (failure is None or failure.code == STOPPED_BEFORE_TRAINING):
        saved = "" if failure else "saved; "
        return Restart(replace(budget, in_a_row=0), 0.0, f"{saved}all start again with the machines that came")
    after = budget.after_failure(seconds)
    if failure is None or after is None:
        return code
    return Restart(after, after.delay, f"{failure.cause}; restart {after.used} of {after.most} in {after.delay:g} s")
