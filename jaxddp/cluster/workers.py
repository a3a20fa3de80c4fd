"""A group of processes from start to end: all succeed, or the first failure ends the others, in bounded time."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxddp.cluster.output import Output, say

PREEMPTED = 75
_STARTER = Path(__file__).with_name("starter.py")
_POLL_SECONDS = 0.02
_MOMENT_SECONDS = 2.0
"""How long the others may take to end by themselves once one has failed: their own last lines say more."""
_DRAIN_SECONDS = 1.0


@dataclass(eq=False)
class Worker:
    """A started process, which leads its own session and process group."""

    rank: int
    process: subprocess.Popen[bytes]
    output: Output
    code: int | None = None
    """Its exit code, or the negative number of the signal that ended it; None while it runs."""

    @classmethod
    def start(
        cls,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        cores: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
    ) -> "Worker":
        """Start a process on `cores` (empty: all), as a direct child of this one.

        Call it from the main thread: on Linux the kernel kills the process, but not its children, when the thread that
        started it ends. Raises `InputError` where the log cannot be written.
        """
        # Isolated: the user's PYTHON* variables and site packages are for the command, not for the starter.
        starter = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid()), ",".join(map(str, cores))]
        process = subprocess.Popen(
            [*starter, *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdout is not None
        try:
            return cls(rank, process, Output(rank, process.stdout, log))
        except BaseException:
            process.kill()
            process.wait()
            raise

    def __str__(self) -> str:
        if self.code is None:
            return f"process {self.rank}: running"
        end = f"exit code {self.code}" if self.code >= 0 else f"killed by {_signal_name(-self.code)}"
        return f"process {self.rank}: {end}"

    def poll(self) -> int | None:
        """Its code, or None while it runs. It stays a zombie, so that the number of its group is not reused."""
        if self.code is None:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self.code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and to its children in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill what is left of the group, and reap the process."""
        if self.process.returncode is None:
            self.send(signal.SIGKILL)
            self.process.wait()


@dataclass
class WorkerGroup:
    """The workers of one machine, watched until all have ended; `close` ends them."""

    grace: float
    """Seconds between SIGTERM and SIGKILL after a failure."""
    save_grace: float
    """The same where all are asked to stop, and save first."""
    workers: list[Worker] = field(default_factory=list)
    _failed: Worker | None = None
    _asked: signal.Signals | None = None
    _plan: list[tuple[float, signal.Signals]] = field(default_factory=list)

    def watch(self, received: list[signal.Signals]) -> int:
        """Wait until all have ended, and report each that did not end with 0.

        Args:
            received: signals that this process receives are appended to it.

        Returns:
            0 where all ended with 0; the exit code of the first failure, or 128 plus its signal; 75 where all others
            than 0 were preempted after saving; 128 plus the received signal where that ended the job.
        """
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.output, selectors.EVENT_READ, worker.output)
            while self._running():
                for key, _ in selector.select(_POLL_SECONDS):
                    output: Output = key.data
                    output.read()
                    if output.ended:
                        selector.unregister(output)
                self._note_ends()
                while received:
                    self._stop_on(received.pop(0))
                self._follow_plan()
        self.close()
        return self._conclude()

    def close(self) -> None:
        """End what still runs, and show the last output."""
        for worker in self.workers:
            worker.end()
        # Only a process that left its group can still hold the pipe.
        give_up = time.monotonic() + _DRAIN_SECONDS
        for worker in self.workers:
            while not worker.output.ended and time.monotonic() < give_up:
                if not worker.output.read():
                    time.sleep(_POLL_SECONDS)
            worker.output.close()

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def _note_ends(self) -> None:
        ended = [worker for worker in self._running() if worker.poll() is not None]
        # Of processes that are found ended together, one that was killed is the likelier cause.
        for worker in sorted(ended, key=lambda worker: ((worker.code or 0) >= 0, worker.rank)):
            worker.output.drain(_DRAIN_SECONDS)
            if worker.code != 0:
                say(str(worker))
                self._stop_after(worker)

    def _stop_after(self, worker: Worker) -> None:
        if self._asked or self._failed:
            return
        if worker.code != PREEMPTED:
            self._failed = worker
            self._schedule(_MOMENT_SECONDS, self.grace)
        elif not self._plan:
            # It has saved and ended; the others were asked to as well, and may still be writing.
            self._schedule(self.save_grace, self.grace)

    def _stop_on(self, number: signal.Signals) -> None:
        if self._asked is not None and number == signal.SIGINT:
            self._plan = [(time.monotonic(), signal.SIGKILL)]
        elif self._asked is None:
            self._asked = number
            say(f"jaxddp launch: {number.name}: every process was asked to save and stop; another Ctrl-C kills them")
            self._schedule(0, self.grace if self._failed else self.save_grace)

    def _schedule(self, terminate: float, kill: float) -> None:
        now = time.monotonic()
        self._plan = [(now + terminate, signal.SIGTERM), (now + terminate + kill, signal.SIGKILL)]

    def _follow_plan(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            for worker in self._running():
                worker.send(number)

    def _conclude(self) -> int:
        codes = {worker.code for worker in self.workers}
        if self._failed is not None:
            lines = self._failed.output.last_lines
            say("\n".join([f"{self._failed}; its last lines, all of them in {self._failed.output.path}:", *lines]))
            return _exit_code(self._failed.code or 0)
        if codes == {0}:
            return 0
        if codes <= {0, PREEMPTED}:
            return PREEMPTED
        assert self._asked is not None
        return _exit_code(-self._asked)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """In the block, SIGINT, SIGTERM and SIGHUP are appended to a list and do nothing else. Main thread only."""
    received: list[signal.Signals] = []
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: received.append(signal.Signals(number))) for name in names}
    # If a parent ignores SIGCHLD, the kernel reaps ended processes, and their exit codes are lost.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
