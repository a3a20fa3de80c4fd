"""Runs trials, one on the devices of each slot at a time, until there are no more, or ends them in bounded time."""

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import jaxddp.cluster.worker as workers
from jaxddp.cluster.machine import divide, local_gpus
from jaxddp.core.cores import local_cores
from jaxddp.core.errors import InputError, JaxddpError, counted
from jaxddp.core.log import say
from jaxddp.core.tpu import local_chips
from jaxddp.sweeps.queues import GridQueue
from jaxddp.sweeps.trials import Trial, TrialEnd
from jaxddp.workdir.lock import is_locked

_OF_A_JOB = frozenset({"JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"})
LOG_FILE = "output.log"
_POLL_SECONDS, _ASK_SECONDS, _DEATH_SECONDS = 0.05, 1.0, 30.0
"""Seconds between two looks at the trials; between an answer of the queue, which may read the files of all trials, and
the next question; and that SIGKILL may take."""
_STOPPED = (workers.PREEMPTED, 128 + signal.SIGINT, workers.STOPPED_BEFORE_TRAINING, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes after a request to stop."""


@dataclass(frozen=True)
class Slot:
    """The devices of one trial at a time.

    Attributes:
        gpus: the GPUs, in the notation of CUDA_VISIBLE_DEVICES; empty for the devices of this process.
        cores: the cores; empty for all cores.
    """

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a trial: those of this process, without the variables of a job."""
        environ = {name: value for name, value in workers.shared_environment().items() if name not in _OF_A_JOB}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        # A trial is a job of its own, also if a scheduler started several sweeps as the processes of one job.
        return environ | gpus | {"JAX_NUM_PROCESSES": "1"}


def slots(jobs: int, environ: Mapping[str, str] = os.environ) -> list[Slot]:
    """Return a slot for each of the trials that run side by side.

    Without GPUs and with more trials than cores, every trial uses all cores.

    Raises: InputError if the GPUs or TPU chips of this machine cannot be divided among the trials.
    """
    if jobs == 1:
        return [Slot()]
    if chips := local_chips():
        raise InputError(f"--jobs {jobs}: a process uses all {len(chips)} TPU chips of this machine; give --jobs 1")
    gpus, cores = local_gpus(environ), local_cores()
    if len(gpus) % jobs:
        possible = " or ".join(str(number) for number in range(1, len(gpus) + 1) if len(gpus) % number == 0)
        problem = f"--jobs {jobs}: {counted(len(gpus), 'GPU')} cannot be divided evenly among the trials"
        raise InputError(f"{problem}; {possible} would do")
    if gpus:
        return [Slot(gpus=tuple(part)) for part in divide(gpus, jobs)]
    can_divide = jobs <= len(cores) and hasattr(os, "sched_setaffinity")
    return [Slot(cores=tuple(part)) for part in divide(cores, jobs)] if can_divide else [Slot()] * jobs


def describe(all_slots: Sequence[Slot]) -> str:
    """Return how trials run: "one after another" or "2 side by side"."""
    return f"{len(all_slots)} side by side" if len(all_slots) > 1 else "one after another"


@dataclass(eq=False)
class TrialProcess:
    """A started trial.

    Attributes:
        starts: how often the sweep has started the trial.
        is_pruned: whether the trial was asked to stop, because its validations are worse than those of other trials.
    """

    trial: Trial
    slot: Slot
    worker: workers.Worker
    starts: int
    is_pruned: bool = False

    @property
    def last_line(self) -> str:
        """The last line of the output, without the prefix of the command."""
        lines = self.worker.output.last_lines
        return lines[-1].partition("] ")[2].removeprefix("jaxddp: ") if lines else ""

    def end(self, workdir: Path) -> TrialEnd:
        """Return how the ended process ended."""
        if self.worker.code in _STOPPED:
            return "pruned" if self.is_pruned else "interrupted"
        if self.worker.code and is_locked(workdir):
            return "elsewhere"  # This process has released its lock, so another run holds it.
        if self.worker.code == workers.BAD_INPUT:
            return "bad input"
        return "failed" if self.worker.code else "done"

    def close(self) -> None:
        """Kill the process if it still runs, and read its last output."""
        self.worker.end(time.monotonic() + _DEATH_SECONDS)
        self.worker.close(time.monotonic() + workers.DRAIN_SECONDS)


@dataclass(eq=False)
class Runner:
    """Runs the trials of a queue. A failed trial does not end the others, but bad input ends a sweep that begins.

    Attributes:
        folder: the folder of the sweep.
        slots: the devices of the trials that run side by side.
        restarts: how often a failed trial is started again.
        save_grace: seconds between SIGTERM and SIGKILL after a request to stop.
        shown: whether the output of the trials is printed on the screen, besides their log files.
        program: the words before the arguments of `jaxddp` in the command of each trial.
    """

    folder: Path
    queue: GridQueue
    slots: Sequence[Slot]
    restarts: int = 1
    save_grace: float = 120.0
    shown: bool = False
    program: Sequence[str] = workers.OWN_PROGRAM

    def __post_init__(self) -> None:
        self._free, self._running = list(self.slots), list[TrialProcess]()
        # "lost" is the end of a trial that failed after a signal, or was killed.
        self._ends, self._number = list[str](), 0
        self._received: signal.Signals | None = None
        self._error: JaxddpError | None = None
        self._kill_at, self._ask_at = math.inf, 0.0

    def run(self) -> int:
        """Run trials until the source has no more. Call this function in the main thread.

        After the first SIGINT, SIGTERM or SIGHUP, all trials are asked to save and stop. A second Ctrl-C kills them.

        Returns:
            The exit code: 0 if all trials are done or pruned; 1 if one failed; 75 if trials were asked to stop and
            saved; 128 plus the signal that this process received if it is SIGINT, or if a trial failed after it or had
            to be killed.

        Raises:
            InputError: a trial reported bad input before one had finished. The others were asked to save and stop.
            JaxddpError: the source raised it. The running trials were asked to save and stop.
        """
        with workers.catch_signals() as events:
            try:
                self._stop_on_error(self._fill)
                while self._running and time.monotonic() < self._kill_at:
                    self._wait(events)
                    self._stop_on_error(self._finish_ended)
                    if time.monotonic() >= self._ask_at:
                        self._stop_on_error(self._prune)
                        self._stop_on_error(self._fill)
                        self._ask_at = time.monotonic() + _ASK_SECONDS
            finally:
                self._kill()
        if self._error is not None:
            raise self._error
        return self._code()

    @property
    def _is_stopping(self) -> bool:
        return self._received is not None or self._error is not None

    def _stop_on_error(self, call: Callable[[], None]) -> None:
        """Call a function. Keep its first error, and ask the running trials to save and stop."""
        try:
            call()
        except JaxddpError as error:
            if self._error is None and self._running and self._received is None:
                self._stop("an error: the running trials were asked to save and stop")
            self._error = self._error or error

    def _fill(self) -> None:
        """Start trials in the free slots."""
        while self._free and not self._is_stopping and (trial := self.queue.next()) is not None:
            self._number += 1
            say(f"{trial.name}: started, output in {self.folder / trial.name / LOG_FILE}")
            self._start(trial, self._free.pop(0))

    def _start(self, trial: Trial, slot: Slot, starts: int = 1) -> None:
        log, command = self.folder / trial.name / LOG_FILE, [*self.program, *trial.command(self.folder)]
        worker = workers.Worker(self._number, command, slot.environment(), log, cores=slot.cores, shown=self.shown)
        self._running.append(TrialProcess(trial, slot, worker, starts))

    def _wait(self, events: SimpleQueue[signal.Signals]) -> None:
        """Wait a moment, and handle signals."""
        time.sleep(_POLL_SECONDS)
        while not events.empty():
            number = events.get_nowait()
            if self._received is not None and number == signal.SIGINT:
                self._kill_at = time.monotonic()
            elif self._received is None:
                self._received = number
                self._stop(f"{number.name}: every trial was asked to save and stop; another Ctrl-C kills them")

    def _stop(self, line: str) -> None:
        """Ask all trials to save and stop."""
        say(f"jaxddp sweep: {line}")
        self._kill_at = min(self._kill_at, time.monotonic() + self.save_grace)
        for process in self._running:
            process.worker.send(signal.SIGTERM)

    def _finish_ended(self) -> None:
        for process in [*self._running]:
            if process.worker.poll() is not None:
                process.close()
                self._running.remove(process)
                self._finish(process)

    def _finish(self, process: TrialProcess) -> None:
        """Record the end of a trial and free its slot, or start the trial again."""
        trial, end = process.trial, process.end(self.folder / process.trial.name)
        ends_sweep = False
        if end == "bad input":
            # The first trial finds faults of all, such as a wrong path; one that has trained, those of data and disks.
            run = self.queue.folder.result(trial).run
            ends_sweep = not self.queue.num_finished() or (run is not None and run.step != 0)
        if end in ("failed", "bad input") and not ends_sweep:
            can_restart = end == "failed" and process.starts <= self.restarts
            is_again = can_restart and not (self._is_stopping or process.worker.has_quit)
            again = f"; started again ({process.starts} of {self.restarts})" if is_again else ""
            say(f"{trial.name}: failed with {str(process.worker).partition(': ')[2]}: {process.last_line}{again}")
            if is_again:
                return self._start(trial, process.slot, process.starts + 1)
        self._ends.append("lost" if end == "failed" and self._received is not None else end)
        self.queue.record_end(trial, end)
        self._free.append(process.slot)
        self._ask_at = 0.0
        if ends_sweep:
            raise InputError(f"{trial.name}: {process.last_line}")

    def _prune(self) -> None:
        for process in self._running:
            if not (self._is_stopping or process.is_pruned) and self.queue.should_prune(process.trial):
                process.is_pruned = True
                process.worker.send(signal.SIGTERM)

    def _kill(self) -> None:
        """Kill the processes that still run, and record their ends."""
        for process in self._running:
            process.worker.send(signal.SIGKILL)
        for process in self._running:
            process.close()
            self._ends.append("lost")
            self._stop_on_error(lambda trial=process.trial: self.queue.record_end(trial, "interrupted"))

    def _code(self) -> int:
        if self._received is not None:
            by_signal = self._received == signal.SIGINT or "lost" in self._ends
            return 128 + self._received if by_signal else workers.PREEMPTED
        return 1 if {"failed", "bad input"} & {*self._ends} else workers.PREEMPTED if "interrupted" in self._ends else 0
