"""Decides whether a job ends or restarts after all its processes have ended."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxddp.core.errors import InputError, Preempted

LONGEST_DELAY = 60.0
LONG_RUN = 600.0
"""After an attempt that ran for at least this many seconds, the delays begin again at the shortest."""
PREEMPTED, BAD_INPUT = Preempted.exit_code, InputError.exit_code
STOPPED_BEFORE_TRAINING = 128 + signal.SIGTERM
"""The exit code of a process that received SIGTERM before it began to train."""


@dataclass(frozen=True)
class End:
    """How the processes of a machine ended.

    Attributes:
        code: 0 after success; the exit code of the first process that failed, or 128 plus its signal; 75 if the
            processes saved and stopped on request.
        cause: the process that failed, with its exit code; or the signal that the launcher received.
        stop_requested: whether the launcher received a signal.
        user_exit: whether the user's code called exit in a process; a restart would then end in the same way.
    """

    code: int
    cause: str
    stop_requested: bool = False
    user_exit: bool = False


@dataclass(frozen=True)
class Budget:
    """The restarts of a job.

    Attributes:
        most: the number of allowed restarts.
        used: the number of restarts so far.
        in_a_row: the number of consecutive failures without a long run between them.
    """

    most: int
    used: int = 0
    in_a_row: int = 0

    def after_failure(self, seconds: float) -> "Budget | None":
        """Return the budget after an attempt that failed after this many seconds; None if no restart is left."""
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
    """A restart of the job after `budget.delay` seconds. `line` is the reason, which is printed."""

    budget: Budget
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
    """Return the exit code of the job, or the restart that follows the start that ended.

    Args:
        ends: how the processes of each machine ended, by the machine's number.
        failure: the first failure on any machine; None if no process failed.
        seconds: how long the processes ran.
        elastic: whether the job continues when a machine other than machine 0 is asked to stop.
        growing: whether all processes were asked to save and stop, so that the next start has more machines.
    """
    if all(end.code == 0 for end in ends.values()):
        return 0
    leaving = [machine for machine, end in ends.items() if end.stop_requested]
    code = PREEMPTED if failure is None else failure.code
    if code == BAD_INPUT or any(end.user_exit for end in ends.values()) or (leaving and (0 in leaving or not elastic)):
        return code
    if leaving:
        names = " and ".join(f"machine {machine}" for machine in sorted(leaving))
        return Restart(replace(budget, in_a_row=0), f"{names} left; the other machines continue")
    if growing and (failure is None or failure.code == STOPPED_BEFORE_TRAINING):
        saved = "" if failure else "saved; "
        return Restart(replace(budget, in_a_row=0), f"{saved}all processes restart with the new machines")
    after = budget.after_failure(seconds)
    if failure is None or after is None:
        return code
    return Restart(after, f"{failure.cause}; restart {after.used} of {after.most} in {after.delay:g} s")
