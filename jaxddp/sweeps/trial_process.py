"""The process of a trial: `jaxddp train` with the devices of a slot, and how it ended."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxddp.cluster.restarts import BAD_INPUT, PREEMPTED, STOPPED_BEFORE_TRAINING
from jaxddp.cluster.worker import Worker
from jaxddp.sweeps.slots import Slot
from jaxddp.sweeps.trials import Trial
from jaxddp.workdir.lock import is_locked

LOG_FILE = "output.log"
_DRAIN_SECONDS, _POLL_SECONDS = 1.0, 0.02
_STOPPED = (PREEMPTED, 128 + signal.SIGINT, STOPPED_BEFORE_TRAINING, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes after a request to stop."""
End = Literal["done", "failed", "interrupted", "pruned", "elsewhere", "bad input"]
"""How a trial ended. "elsewhere" means that another process trains in its work directory."""


@dataclass(eq=False)
class TrialProcess:
    """A started trial.

    Attributes:
        folder: the folder of the sweep.
        starts: how often the sweep has started the trial.
        is_pruned: whether the trial was asked to stop, because its validations are worse than those of other trials.
    """

    trial: Trial
    folder: Path
    slot: Slot
    worker: Worker
    starts: int = 1
    is_pruned: bool = False

    @classmethod
    def start(
        cls, trial: Trial, folder: Path, slot: Slot, program: Sequence[str], number: int, *, starts: int, shown: bool
    ) -> "TrialProcess":
        """Start a trial. Its output is appended to `output.log` in its work directory.

        Args:
            program: the words before the arguments of `jaxddp`.
            number: the prefix of its lines on the screen.
            shown: whether its output is also printed on the screen.

        Raises:
            InputError: the log cannot be written.
        """
        log, command = folder / trial.name / LOG_FILE, [*program, *trial.command(folder)]
        worker = Worker.start(number, command, slot.environment(), log, cores=slot.cores, shown=shown)
        return cls(trial, folder, slot, worker, starts)

    @property
    def last_line(self) -> str:
        """The last line of the output, without the prefix of the command."""
        lines = self.worker.output.last_lines
        return lines[-1].partition("] ")[2].removeprefix("jaxddp: ") if lines else ""

    @property
    def end(self) -> End:
        """How the ended process ended."""
        code = self.worker.code
        if code == 0:
            return "done"
        if code in _STOPPED:
            return "pruned" if self.is_pruned else "interrupted"
        if code == BAD_INPUT:
            # This process has released its lock, so another run holds it.
            return "elsewhere" if is_locked(self.folder / self.trial.name) else "bad input"
        return "failed"

    @property
    def how(self) -> str:
        """The exit code or the signal of the ended process."""
        return str(self.worker).partition(": ")[2]

    def prune(self) -> None:
        """Ask the process to save and stop."""
        self.is_pruned = True
        self.worker.send(signal.SIGTERM)

    def close(self, deadline: float) -> None:
        """Kill the process if it still runs, and read its last output. `deadline` is a time of the monotonic clock."""
        self.worker.end(deadline)
        # Only a process that left its group can still hold the pipe open.
        give_up, output = time.monotonic() + _DRAIN_SECONDS, self.worker.output
        while not output.has_ended and time.monotonic() < give_up:
            if not output.read():
                time.sleep(_POLL_SECONDS)
        output.close()
        self.worker.status.close()
