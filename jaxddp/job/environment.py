"""This process's place in its job, read from the environment variables that its launcher or scheduler sets.

What each of them sets is in `schedulers.py`. Nothing here starts a JAX backend.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxddp.core.errors import InputError, about
from jaxddp.core.wording import show
from jaxddp.job.ports import split_address
from jaxddp.job.schedulers import EXPLICIT, SCHEDULERS, Scheduler
from jaxddp.job.variables import COUNT, INDEX, Environ, Found, look, number, text
from jaxddp.wire.handshake import KEY, Identity

RUN_ID = "JAXDDP_RUN_ID"


@dataclass(frozen=True)
class Job:
    """This process's place in its job."""

    coordinator: str
    """`host:port`, where process 0 waits for the others."""
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    """Which of this host's accelerators this process uses; None for all that it sees."""
    run_id: str = ""
    """Distinguishes this job from another at the same address; empty where the scheduler gives none."""
    sources: tuple[str, ...] = ()
    """The variables that these values come from."""
    key: str = field(default="", repr=False)
    """A secret that its processes share; empty where they have none, and whoever reaches the coordinator may join."""

    @property
    def host(self) -> str:
        return split_address(self.coordinator)[0]

    @property
    def port(self) -> int:
        return split_address(self.coordinator)[1]

    @property
    def identity(self) -> Identity:
        return Identity(self.process_id, self.num_processes, self.run_id, self.key)

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}, coordinator {self.coordinator}"
        return f"{place} (from {', '.join(self.sources)})"


def find_job(environ: Environ = os.environ) -> Job | None:
    """Read the job from the environment (by default that of this process); None for a single process.

    The address, the number of processes and this one's id are looked up one by one: in JAX's variables, then in those
    of what started this process, then in all others. `JAX_NUM_PROCESSES=1` makes a process alone wherever it runs.

    Raises `InputError` where variables say that there are more processes and not where they meet or which this one is,
    or where one cannot be used; names these.
    """
    schedulers = [scheduler for scheduler in SCHEDULERS if scheduler.sign is None or look(environ, scheduler.sign)]
    started = next((scheduler for scheduler in schedulers if scheduler.process(environ)), EXPLICIT)
    ordered = [EXPLICIT, started, *schedulers]
    count = next(filter(None, (scheduler.count(environ) for scheduler in ordered)), None)
    process = started.process(environ)
    num_processes = number(count, COUNT) if count else None
    if num_processes == 1 and (process is None or number(process, INDEX) == 0 or _is_told_to_be_alone(environ)):
        return None
    address = next(filter(None, (scheduler.address(environ) for scheduler in ordered)), None)
    if not (address or count or process):
        return None
    if address is None or process is None or count is None or num_processes is None:
        raise _missing(address, count, process)
    process_id = number(process, INDEX)
    if process_id >= num_processes:
        last = num_processes - 1
        raise InputError(f"{process.variable}={process_id}: expected 0 to {last}, for {count.variable}={num_processes}")
    with about(f"{address.variable}={show(address.value)}"):
        split_address(address.value)
    devices = _local_devices(environ, ordered)
    found = [each for each in (address, count, process, devices) if each]
    return Job(
        coordinator=address.value,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=_device_ids(devices) if devices else None,
        run_id=text(environ, RUN_ID) or started.run_id(environ),
        key=text(environ, KEY),
        sources=tuple(dict.fromkeys(name for each in found for name in each.variable.split(", "))),
    )


def _is_told_to_be_alone(environ: Environ) -> bool:
    """Whether a person says so, against a scheduler that has given this process a number."""
    return EXPLICIT.count(environ) is not None and EXPLICIT.process(environ) is None


def _local_devices(environ: Environ, schedulers: Sequence[Scheduler]) -> Found | None:
    """Which accelerators this process uses: those of JAX_LOCAL_DEVICE_IDS, or one for each process of the host."""
    if said := look(environ, "JAX_LOCAL_DEVICE_IDS"):
        return said
    for scheduler in schedulers:
        local = look(environ, scheduler.local)
        if local is None:
            continue
        # A scheduler that shows each process one device has already assigned it.
        chosen = len(environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and environ.get("CUDA_VISIBLE_DEVICES")
        shared = look(environ, scheduler.locals)
        return None if chosen or shared is None or _first_count(shared) == 1 else local
    return None


def _first_count(found: Found) -> int:
    """Of SLURM's `2(x3),1` the 2; of other variables the number that they hold."""
    return number(Found(re.split(r"[(,]", found.value)[0], found.variable), COUNT)


def _device_ids(found: Found) -> tuple[int, ...]:
    return tuple(number(Found(part.strip(), found.variable), INDEX) for part in found.value.split(","))


def _missing(address: Found | None, count: Found | None, process: Found | None) -> InputError:
    wanted = {
        "the coordinator's address (JAX_COORDINATOR_ADDRESS)": address,
        "the number of processes (JAX_NUM_PROCESSES)": count,
        "this process's id (JAX_PROCESS_ID)": process,
    }
    found = ", ".join(each.variable for each in wanted.values() if each)
    missing = [name for name, each in wanted.items() if each is None]
    advice = f"set {'it' if len(missing) == 1 else 'them'}, or JAX_NUM_PROCESSES=1 for a process alone"
    return InputError(f"environment: {found} set but not {' and '.join(missing)}; {advice}")
