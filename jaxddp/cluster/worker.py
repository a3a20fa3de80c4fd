"""A process that the launcher starts: its start, its output, its signals and its end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp.cluster.process_output import Output
from jaxddp.job.work_status import STATUS_PIPE, WorkStatus

_STARTER = Path(__file__).with_name("starter.py")
_TWICE = "tried to connect with a different incarnation"
_A_STRANGER = (
    "a process with that number was started twice, or one that is none of the job reached JAX's own port, which a "
    'private network closes: docs/scaling.md, "Trust"'
)
_ANOTHER = "another process ended, which its log says"


@dataclass(eq=False)
class Worker:
    """A started process, which leads its own session and process group."""

    rank: int
    process: subprocess.Popen[bytes]
    output: Output
    status: WorkStatus
    code: int | None = None
    """Its exit code, or the negative number of the signal that ended it; None while it runs. Of one that ended in the
    midst of its work with 0 it is 1."""
    _ended_at_work: bool = False

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
        with WorkStatus.open() as (status, into):
            process = subprocess.Popen(
                [*starter, *command],
                env={**environ, STATUS_PIPE: str(into)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[*pass_fds, into],
                start_new_session=True,
                bufsize=0,
            )
        assert process.stdout is not None
        try:
            return cls(rank, process, Output(rank, process.stdout, log), status)
        except BaseException:
            process.kill()
            process.wait()
            raise

    def __str__(self) -> str:
        if self.code is None:
            return f"process {self.rank}: running"
        if self._ended_at_work:
            return f"process {self.rank}: exit code 0 in the midst of its work, as by os._exit(0)"
        end = f"exit code {self.code}" if self.code >= 0 else f"killed by {_signal_name(-self.code)}"
        return f"process {self.rank}: {end}{self._cause()}"

    @property
    def has_quit(self) -> bool:
        """Whether the user's code ended it, and would do so again."""
        return self._ended_at_work or self.status.has_quit

    def poll(self) -> int | None:
        """Its code, or None while it runs. It stays a zombie, so that the number of its group is not reused."""
        if self.code is None:
            self.status.read()
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self.status.read()
                self.code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                self._ended_at_work = self.code == 0 and self.status.is_working
                self.code = 1 if self._ended_at_work else self.code
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and to its children in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def end(self, give_up: float) -> None:
        """Kill what is left of the group, and reap the process if it ends before this time of the monotonic clock."""
        if self.process.returncode is None:
            self.send(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, give_up - time.monotonic()))

    def _cause(self) -> str:
        """Why JAX's coordination service aborted it, where it did; its own words, and what they mean to people."""
        said = self.output.word_of_jax if self.code == -signal.SIGABRT else ""
        return f" (JAX's service: {said} Perhaps {_A_STRANGER if _TWICE in said else _ANOTHER})" if said else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
