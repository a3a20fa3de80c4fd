"""The job of this process, from the environment variables of its launcher or scheduler; and the report to the launcher.

`schedulers.py` defines the variables of each launcher and scheduler. This module does not start a JAX backend.
"""

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxddp.core.errors import InputError, about, show
from jaxddp.core.phases import working
from jaxddp.core.ranges import Range
from jaxddp.job.env_variables import COUNT, INDEX, Environ, EnvValue, index_below, lookup, number, text
from jaxddp.job.messages import KEY, split_address
from jaxddp.job.schedulers import EXPLICIT, SCHEDULERS, TPU, Scheduler
from jaxddp.job.tpu import with_metadata

RUN_ID = "JAXDDP_RUN_ID"
INHERITED_SOCKET = "JAXDDP_COORDINATOR_FD"
"""The environment variable with the file descriptor of the socket that the launcher already listens on."""
STATUS_PIPE = "JAXDDP_STATUS_FD"
"""The environment variable with the file descriptor of the writable end of the pipe."""
_BEGIN, _END, _QUIT = b"+", b"-", b"!"
"""`_QUIT` means that the user's code ended the process, so a restarted process would end in the same way."""


@dataclass(frozen=True)
class Job:
    """The job of this process, and the id of this process in the job."""

    coordinator: str
    """The `host:port` where process 0 listens for the other processes."""
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    """The accelerators of this host that this process uses; None for all visible accelerators."""
    run_id: str = ""
    """Distinguishes this job from other jobs at the same address; empty if the scheduler sets no id."""
    sources: tuple[str, ...] = ()
    """The environment variables from which the other attributes were read; `metadata/…` for the metadata server."""
    key: str = field(default="", repr=False)
    """The secret that the processes share. If it is empty, any process that reaches the coordinator can join."""

    @property
    def host(self) -> str:
        """The coordinator's host."""
        return split_address(self.coordinator)[0]

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return split_address(self.coordinator)[1]

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}, coordinator {self.coordinator}"
        return f"{place} (from {', '.join(self.sources)})"


def find_job(environ: Environ = os.environ, root: Path = Path("/")) -> Job | None:
    """Return the job that the environment (by default that of this process) describes; None for a single process.

    The coordinator's address, the number of processes and the id of this process are looked up separately: first in
    JAX's variables, then in the variables of the scheduler that started this process, then in those of all other
    schedulers. With `JAX_NUM_PROCESSES=1` and no process id in JAX's variables, this is a single process, and no other
    variable is read. On a TPU VM, Google's metadata server is asked, too; see `jaxddp.job.tpu.with_metadata`. `root` is
    the folder that holds `dev` and `sys`, which show the TPU chips of this machine.

    Raises:
        InputError: the variables describe several processes, but the coordinator's address or the id of this process is
            missing; or a value is invalid. The error names the variables.
        Unreachable: the metadata server of a TPU VM does not answer in time.
    """
    alone = lookup(environ, EXPLICIT.count)
    if alone is not None and number(alone, COUNT) == 1 and lookup(environ, EXPLICIT.process) is None:
        return None
    if not any(lookup(environ, scheduler.process) for scheduler in SCHEDULERS[: SCHEDULERS.index(TPU)]):
        environ = with_metadata(environ, root)
    schedulers = [each for each in SCHEDULERS if not each.marker or lookup(environ, each.marker)]
    own_scheduler = next((scheduler for scheduler in schedulers if lookup(environ, scheduler.process)), EXPLICIT)
    ordered = [EXPLICIT, own_scheduler, *schedulers]
    count = next(filter(None, (lookup(environ, scheduler.count) for scheduler in ordered)), None)
    process = lookup(environ, own_scheduler.process)
    num_processes = number(count, COUNT) if count else None
    if num_processes == 1 and (process is None or number(process, INDEX) == 0):
        return None
    address = next(filter(None, (scheduler.coordinator(environ) for scheduler in ordered)), None)
    if not (address or count or process):
        return None
    if address is None or process is None or count is None or num_processes is None:
        parts = {
            "the coordinator's address (JAX_COORDINATOR_ADDRESS)": address,
            "the number of processes (JAX_NUM_PROCESSES)": count,
            "this process's id (JAX_PROCESS_ID)": process,
        }
        # One variable may have several parts.
        present = ", ".join(dict.fromkeys(part.variable for part in parts.values() if part))
        missing = [name for name, part in parts.items() if part is None]
        advice = f"set {'it' if len(missing) == 1 else 'them'}, or JAX_NUM_PROCESSES=1 for a single process"
        raise InputError(f"environment: {present} set but not {' and '.join(missing)}", advice=advice)
    process_id = index_below(process, num_processes, f"for {count.variable}={num_processes}")
    with about(f"{address.variable}={show(address.value)}"):
        split_address(address.value)
    devices = lookup(environ, "JAX_LOCAL_DEVICE_IDS") or _local_rank(environ, ordered)
    ids = devices and tuple(number(devices._replace(value=id_), INDEX) for id_ in re.split(r"\s*,\s*", devices.value))
    settings = [setting for setting in (address, count, process, devices) if setting]
    sources = tuple(dict.fromkeys(name for setting in settings for name in setting.variable.split(", ")))
    of_scheduler = lookup(environ, own_scheduler.run_id)
    run_id = text(environ, RUN_ID) or (of_scheduler.value if of_scheduler else "")
    return Job(address.value, num_processes, process_id, ids, run_id, sources, text(environ, KEY))


def _local_rank(environ: Environ, schedulers: Sequence[Scheduler]) -> EnvValue | None:
    """Return the local rank, the number of this process's accelerator; None if it uses all that it sees."""
    for scheduler in schedulers:
        rank, host_count = (lookup(environ, name) for name in scheduler.local)
        if rank is None:
            continue
        num_local = number(host_count, COUNT) if host_count else 1
        visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("ROCR_VISIBLE_DEVICES")
        num_visible = len(visible.split(",")) if visible else 0
        # If the visible devices are fewer than the processes, the scheduler has already assigned them to this process.
        assigned = num_visible and (num_visible < num_local or scheduler.binds_gpus(environ, num_visible))
        return None if assigned or num_local == 1 else rank
    return None


@contextlib.contextmanager
def report_work() -> Iterator[None]:
    """Report to the launcher that this process works during the block, and measure its time. Blocks can be nested."""
    _write(_BEGIN)
    try:
        with working():
            yield
    except (SystemExit, GeneratorExit):
        _write(_QUIT)
        raise
    finally:
        _write(_END)


def _write(status: bytes) -> None:
    if (pipe := _pipe()) is not None:
        # The work continues if the launcher is gone or does not read.
        with contextlib.suppress(OSError):
            os.write(pipe, status)


@functools.cache
def _pipe() -> int | None:
    pipe = inherited(STATUS_PIPE)
    with contextlib.suppress(OSError):
        if pipe is not None and stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.set_blocking(pipe, False)
            return pipe
    return None


def inherited(variable: str) -> int | None:
    """Return the file descriptor in a variable of the launcher, and unset it, because children must not use it.

    Raises: InputError if the value is no file descriptor.
    """
    found = lookup(os.environ, variable)
    os.environ.pop(variable, None)
    return number(found, Range(0, 2**20)) if found else None


class WorkStatus:
    """The status of a process, which the launcher reads from a pipe.

    Attributes:
        writing: the file descriptor of the writable end of the pipe, for the process. This process closes it.
        is_working: whether the process is working.
        has_quit: whether the user's code ended the process, for example by `sys.exit`.
    """

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        self._depth, self.is_working, self.has_quit = 0, False, False

    def read(self) -> None:
        """Read the reports that the process has written so far."""
        while not self._pipe.closed and (data := self._pipe.read(4096)):
            self._depth += data.count(_BEGIN) - data.count(_END)
            self.is_working = self._depth > 0
            self.has_quit = self.has_quit or _QUIT in data

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()
