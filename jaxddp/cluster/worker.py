"""The processes that the launcher starts: their output, on the screen and in log files, and their end.

After the first failure or a signal, the other processes of a group end in bounded time.
"""

import contextlib
import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import IO, Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Preempted
from jaxddp.core.log import say
from jaxddp.job.environment import INHERITED_SOCKET, STATUS_PIPE, WorkStatus
from jaxddp.job.messages import ExitCode, Message, Number, Shown

_LONGEST_LINE = 1 << 16
_LAST_LINES = 10
_MOST_UNSHOWN = 1000
_UPDATE_SECONDS = 1.0
DRAIN_SECONDS = 1.0
"""The time for the last output of an ended process."""
_JAX_FATAL, _STATUS = "JAX distributed service detected fatal errors", "absl::Status: "
"""Text in the line that JAX logs before a C++ stack."""
_PER_PROCESS_VARIABLES = frozenset({INHERITED_SOCKET, "JAX_LOCAL_DEVICE_IDS"})
_STARTER = Path(__file__).with_name("starter.py")
# With -P, a file of the working directory, such as numbers.py, takes the place of no module, as in the program jaxddp.
OWN_PROGRAM = (sys.executable, *(() if getattr(sys.modules["__main__"], "__spec__", None) else ("-P",)), "-m", "jaxddp")
"""The words before the arguments of `jaxddp` in a command."""
_LONGEST_MESSAGE = 1000


class Output(threading.Thread):
    """A thread that copies the output of a process from a pipe to the screen and to the file at `path`.

    On the screen a line has the id of the process as its prefix. A line without an end is shown in pieces of 64 KiB.
    After a carriage return, a progress bar overwrites its line. Its updates are shown at most once a second. A paused
    screen (`| less`) may be 1,000 lines behind the file. Only then does the process wait for it.

    Args:
        shown: whether the lines are printed on the screen.

    Attributes:
        last_lines: the last ten lines, with their prefix.
        jax_error: the error that JAX's coordination service logs before it aborts the process; empty without an abort.
    """

    _screen = threading.Lock()

    def __init__(self, rank: int, pipe: IO[bytes], path: Path, *, shown: bool = True):
        super().__init__(name=f"output of process {rank}", daemon=True)
        self.path, self._shown, self._rank, self._log = path, shown, rank, _open_log(path)
        # The escaped bytes are written to the log unchanged.
        self._text = io.TextIOWrapper(pipe, "utf-8", "surrogateescape", newline="")
        self.last_lines, self.jax_error, self._is_closed = deque[str](maxlen=_LAST_LINES), "", False
        self._unshown = Queue[str | None](_MOST_UNSHOWN)
        self._showing = threading.Thread(target=self._show_lines, daemon=True)
        self._showing.start()
        self.start()

    def run(self) -> None:
        """Copy the output until the writable end of the pipe is closed in all processes."""
        update, next_update = "", 0.0
        with self._text as text:
            while not self._is_closed and (line := text.readline(_LONGEST_LINE)):
                self._write_log(line.encode("utf-8", "surrogateescape"))
                is_update, update = line.endswith("\r"), line
                if is_update and (not line.strip() or time.monotonic() < next_update):
                    continue
                self._show(line)
                next_update, update = time.monotonic() + _UPDATE_SECONDS, ""
        if update.strip():
            self._show(update)
        with contextlib.suppress(OSError):
            self._log.close()
        self._unshown.put(None)
        self._showing.join()

    def close(self, deadline: float = 0.0) -> None:
        """Wait until `deadline` for the end of the output, and stop copying."""
        # Only a process that left its group can still hold the pipe open. Its further output is not read.
        self.join(max(0.0, deadline - time.monotonic()))
        self._is_closed = True

    def _write_log(self, data: bytes) -> None:
        try:
            self._log.write(data)
        except OSError as error:
            say(f"jaxddp launch: {self.path}: cannot be written ({error.strerror}); the run continues without it")
            self._log = open(os.devnull, "wb")  # noqa: SIM115

    def _show(self, text: str) -> None:
        line = text.rstrip("\r\n").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        self.last_lines.append(f"[{self._rank}] {line}")
        if _JAX_FATAL in line:
            self.jax_error = line.partition(_STATUS)[2].strip()
        if self._shown:
            self._unshown.put(self.last_lines[-1])

    def _show_lines(self) -> None:
        while (line := self._unshown.get()) is not None:
            with self._screen:
                say(line, sys.stdout)


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run appends to its log.
        log = files.open_regular(path, "ab", buffering=0)
        if log.tell():
            log.write(f"--- started again, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another folder with --logs") from error
    return log


class Worker:
    """A started process, a direct child of this one, which is the leader of its own session and process group.

    Start it in the main thread. On Linux, when the thread that started the process ends, the kernel kills the process,
    but not its children.

    Args:
        rank: the id of the process.
        command: the program and its arguments.
        environ: the environment variables.
        log: the file for the output of the process.
        cores: the cores that the process may use; empty for all cores.
        passed: the file descriptors that the process inherits, by the environment variables that tell them.
        shown: whether the output is also printed on the screen.

    Attributes:
        code: the exit code, or the negative number of the signal that ended the process; None while the process runs.
            If the process ended with 0 during its work, the code is 1.

    Raises: InputError if the log cannot be written, or the system does not permit another process or file.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        cores: Sequence[int] = (),
        passed: Mapping[str, int] = {},
        shown: bool = True,
    ):
        self.rank, self._ended_at_work, self._is_reaped = rank, False, False
        self.code: int | None = None
        # With -I and -S, the user's PYTHON* variables and site packages affect only the command, not the starter.
        starter = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid()), ",".join(map(str, cores)), *command]
        try:
            reading, writing = os.pipe()
            self.output = Output(rank, os.fdopen(reading, "rb", buffering=0), log, shown=shown)
            self.status = WorkStatus()
            passed = {**passed, STATUS_PIPE: self.status.writing}
            env = {**environ, **{name: str(descriptor) for name, descriptor in passed.items()}}
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": writing}
            self.process = subprocess.Popen(
                starter, env=env, pass_fds=[*passed.values()], start_new_session=True, **streams
            )
        except (OSError, RuntimeError) as error:
            # The program ends after this error, so no file is closed here.
            problem = f"process {rank}: cannot be started ({getattr(error, 'strerror', error)})"
            advice = "start fewer processes, or raise the limits that `ulimit -a` shows"
            raise InputError(problem, advice=advice) from error
        os.close(writing)
        os.close(self.status.writing)

    def __str__(self) -> str:
        if self.code is None:
            return f"process {self.rank}: running"
        if self._ended_at_work:
            return f"process {self.rank}: exit code 0 during its work, as from os._exit(0)"
        if self.code >= 0:
            return f"process {self.rank}: exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in {*signal.Signals} else f"signal {-self.code}"
        message = self.output.jax_error if self.code == -signal.SIGABRT else ""
        cause = f" (JAX's service: {message[:_LONGEST_MESSAGE]})" if message else ""
        return f"process {self.rank}: killed by {name}{cause}"

    @property
    def has_quit(self) -> bool:
        """Whether the user's code ended the process, so that a restart would end in the same way."""
        return self._ended_at_work or self.status.has_quit

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs.

        An ended process stays a zombie, so that the kernel does not reuse the id of its process group.
        """
        if self.code is None:
            self.status.read()
            if (code := self._exit_code()) is not None:
                self.status.read()
                self._ended_at_work = code == 0 and self.status.is_working
                self.code = 1 if self._ended_at_work else code
        return self.code

    def _exit_code(self) -> int | None:
        if not hasattr(os, "waitid"):  # macOS, with a Python before 3.13: the process is reaped.
            return self.process.poll()
        end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return end and (end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and to the children in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def end(self, deadline: float) -> None:
        """Kill the process group, and reap the process if it ends before `deadline`, a time of the monotonic clock."""
        if not self._is_reaped:
            self.send(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
                self._is_reaped = True

    def close(self, deadline: float) -> None:
        """Read the last output of the ended process until `deadline`, and close its files."""
        self.output.close(deadline)
        self.status.close()


def shared_environment() -> dict[str, str]:
    """Return the environment variables of this process for its workers, with settings that all workers share."""
    # Each of the omitted variables is for one process. This process may have inherited them from a launcher.
    environ = {name: value for name, value in os.environ.items() if name not in _PER_PROCESS_VARIABLES}
    # Huge pages for malloc made a training step on a CPU 9 to 20% faster in measurements.
    environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # With buffering, a killed process would lose its last lines.
    environ.setdefault("PYTHONUNBUFFERED", "1")
    return environ


@contextlib.contextmanager
def catch_signals() -> Iterator[SimpleQueue[Any]]:
    """Put SIGINT, SIGTERM and SIGHUP into a queue during the block. Call this function in the main thread."""
    events = SimpleQueue[Any]()
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP.
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: events.put(signal.Signals(number))) for name in names}
    # With an inherited SIG_IGN for SIGCHLD, the kernel would discard the exit codes of child processes.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield events
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)


PREEMPTED, BAD_INPUT = Preempted.exit_code, InputError.exit_code
STOPPED_BEFORE_TRAINING = 128 + signal.SIGTERM
"""The exit code of a process that received SIGTERM before it began to train."""


@dataclass(frozen=True)
class End(Message):
    """How the processes of a machine ended. The launchers of several machines also send it to each other.

    Attributes:
        code: 0 after success; the exit code of the first process that failed, or 128 plus its signal; 75 if the
            processes saved and stopped on request.
        cause: the process that failed, with its exit code; or the signal that the launcher received.
        stop_requested: whether the launcher received a signal.
        user_exit: whether the user's code called exit in a process; a restart would then end in the same way.
        generation: the number of the start of the whole job to which the processes belong.
    """

    code: ExitCode
    cause: Shown
    stop_requested: bool = False
    user_exit: bool = False
    generation: Number = 0


@dataclass(frozen=True)
class Failure(End):
    """The end of the first process that failed on a machine. The other processes of the machine may still run."""


_POLL_SECONDS = 0.02
_SELF_END_SECONDS = 2.0
"""The time after a failure in which the other processes may end by themselves, because their own errors are more
informative than a signal."""
_DEATH_SECONDS = 30.0
"""The time that SIGKILL may take. A process that waits in the kernel for a broken disk or GPU may never end."""


@dataclass
class WorkerGroup:
    """The workers of one machine. `watch` waits for them, and `end` or `close` ends them."""

    grace: float
    """Seconds between SIGTERM and SIGKILL after a failure."""
    save_grace: float
    """Seconds between SIGTERM and SIGKILL after all processes are asked to save and stop."""
    generation: int = 0
    workers: list[Worker] = field(default_factory=list)
    _first_failed: Worker | None = None
    received_signal: signal.Signals | None = None
    _plan: list[tuple[float, signal.Signals]] = field(default_factory=list)
    _unkillable_after: float = math.inf
    """The time, set when SIGKILL is sent, after which a process that still runs counts as unkillable."""

    def watch(self, events: SimpleQueue[Any]) -> Iterator[Any]:
        """Yield events until all processes have ended; several times a second None, if there is no event.

        The events are those of `events`, except signals, and a `Failure`. A line is printed about each process that
        ends with a nonzero exit code.
        """
        while self._running() and time.monotonic() < self._unkillable_after:
            yield from self._record_ends()
            event = None
            with contextlib.suppress(Empty):
                event = events.get(timeout=_POLL_SECONDS)
            if isinstance(event, signal.Signals):
                self._stop_on_signal(event)
            else:
                yield event
            self._follow_plan()

    def save(self) -> None:
        """Ask all processes to save and stop."""
        if not self._plan:
            self._schedule(0, self.save_grace)

    def stop_with_others(self, *, saved: bool) -> None:
        """End the processes, because the processes of another machine ended. If `saved`, let them save first."""
        if not self._plan:
            self._schedule(self.save_grace if saved else _SELF_END_SECONDS, self.grace)

    def report(self) -> None:
        """Print the first failure and the last lines of that process."""
        if self._first_failed is not None:
            output = self._first_failed.output
            say("\n".join([f"{self._first_failed}; its last lines, all of them in {output.path}:", *output.last_lines]))

    def close(self) -> None:
        """End the processes that still run, and print the last output."""
        deadline = min(time.monotonic() + _DEATH_SECONDS, self._unkillable_after)
        for worker in self.workers:
            worker.end(deadline)
        deadline = time.monotonic() + DRAIN_SECONDS
        for worker in self.workers:
            worker.close(deadline)

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def _record_ends(self) -> Iterator[Failure]:
        ended = [worker for worker in self._running() if worker.poll() is not None]
        deadline = time.monotonic() + DRAIN_SECONDS
        # If several processes ended at the same time, a process killed by a signal is the most likely cause.
        for worker in sorted(ended, key=lambda worker: ((worker.code or 0) >= 0, worker.rank)):
            worker.output.join(max(0.0, deadline - time.monotonic()))
            if worker.code == 0:
                continue
            say(str(worker))
            if self._first_failed:
                continue
            if self.received_signal:
                if worker.code == BAD_INPUT:
                    # For example, the disk is full when all processes save. A restart would fail in the same way.
                    self._first_failed = worker
            elif worker.code != PREEMPTED:
                self._first_failed = worker
                self._schedule(_SELF_END_SECONDS, self.grace)
                yield Failure(**vars(self._end_of(worker)))
            elif not self._plan:
                # This process has saved and ended. The other processes were also asked to stop, and may still save.
                self._schedule(self.save_grace, self.grace)

    def _stop_on_signal(self, number: signal.Signals) -> None:
        if self.received_signal is not None and number == signal.SIGINT:
            self._plan = [(time.monotonic(), signal.SIGKILL)]
        elif self.received_signal is None:
            self.received_signal = number
            say(f"jaxddp launch: {number.name}: every process was asked to save and stop; another Ctrl-C kills them")
            self._schedule(0, self.grace if self._first_failed else self.save_grace)

    def _schedule(self, terminate: float, kill: float) -> None:
        now = time.monotonic()
        self._plan = [(now + terminate, signal.SIGTERM), (now + terminate + kill, signal.SIGKILL)]

    def _follow_plan(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            for worker in self._running():
                worker.send(number)
            if number == signal.SIGKILL:
                self._unkillable_after = time.monotonic() + _DEATH_SECONDS

    def end(self) -> End:
        """End the processes that still run, and return how the group ended.

        The code is 0 if all processes ended with 0. After a failure, it is the exit code of the first failure, or 128
        plus its signal. The code is 75 if processes saved and stopped on request, and the others succeeded. After a
        signal to the launcher, it is 128 plus the signal if the signal ended processes, and 2 if a process reported a
        mistake of the user. It is 1 if a process cannot be killed.
        """
        self.close()
        codes, signalled, left = {worker.code for worker in self.workers}, self.received_signal, self._running()
        for worker in left:
            say(f"process {worker.rank}: SIGKILL does not end it; it waits in the kernel (for a disk or GPU?)")
        if self._first_failed is not None:
            return self._end_of(self._first_failed)
        code, cause = max(code or 0 for code in codes), "asked to stop"
        if left:
            code, cause = 1, f"process {left[0].rank}: cannot be killed"
        elif signalled is not None and not codes <= {0, PREEMPTED}:
            code, cause = 128 + signalled, signalled.name
        return End(code, cause, signalled is not None, generation=self.generation)

    def _end_of(self, worker: Worker) -> End:
        # The other processes ended because of this one, so their exit codes do not matter.
        user_exit, code = any(each.has_quit for each in self.workers), worker.code or 0
        # After a signal, the code of a process is negative.
        exit_code = code if code >= 0 else 128 - code
        return End(exit_code, str(worker), self.received_signal is not None, user_exit, self.generation)
