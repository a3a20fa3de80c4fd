"""This process's place in its job, read from the environment variables that its launcher or scheduler sets.

The coordinator's address, the number of processes and this process's id are each looked up separately, in the order of
`_STARTERS`: JAX's variables come before a scheduler's. Nothing here starts a JAX backend.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxddp.errors import InputError, about
from jaxddp.job.ports import LOOPBACK, split_address
from jaxddp.wording import show

Environ = Mapping[str, str]
RUN_ID, KEY = "JAXDDP_RUN_ID", "JAXDDP_JOB_KEY"


class Found(NamedTuple):
    """A value, and the variable that holds it."""

    value: str
    variable: str


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
    """Distinguishes this job from another at the same address; empty where the starter gives none."""
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

    def __str__(self) -> str:
        place = f"process {self.process_id} of {self.num_processes}, coordinator {self.coordinator}"
        return f"{place} (from {', '.join(self.sources)})"


@dataclass(frozen=True)
class _Starter:
    """The variables of one kind of launcher; the address takes a function, because few have one variable for it."""

    process: str
    count: str | None = None
    address: Callable[[Environ], Found | None] = lambda environ: None
    local: str | None = None
    """This process's number on its host, where each process has its own accelerator."""
    locals: str | None = None
    """How many processes share the host; of SLURM's `2(x3),1`, the first number."""
    sign: str | None = None
    """The other variables count only where this one is set."""


def find_job(environ: Environ = os.environ) -> Job | None:
    """Read the job from the environment (by default that of this process); None for a single process.

    Raises `InputError` where only some of address, count and id are set, or one cannot be used; names these.
    """
    starters = [starter for starter in _STARTERS if starter.sign is None or _look(environ, starter.sign)]
    address = next(filter(None, (starter.address(environ) for starter in starters)), None)
    count = next(filter(None, (_look(environ, starter.count) for starter in starters)), None)
    process = next(filter(None, (_look(environ, starter.process) for starter in starters)), None)
    if not (address or count or process):
        return None
    num_processes = _number(count, least=1) if count else None
    if num_processes == 1 and (process is None or _number(process, least=0) == 0):
        return None
    if address is None or process is None or count is None or num_processes is None:
        raise _missing(address, count, process)
    process_id = _number(process, least=0)
    if process_id >= num_processes:
        last = num_processes - 1
        raise InputError(f"{process.variable}={process_id}: expected 0 to {last}, for {count.variable}={num_processes}")
    with about(f"{address.variable}={show(address.value)}"):
        split_address(address.value)
    devices = _local_devices(environ, starters)
    found = [each for each in (address, count, process, devices) if each]
    return Job(
        coordinator=address.value,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=_device_ids(devices) if devices else None,
        run_id=_run_id(environ),
        key=environ.get(KEY, ""),
        sources=tuple(dict.fromkeys(name for each in found for name in each.variable.split(", "))),
    )


def _run_id(environ: Environ) -> str:
    """The name that the starter gives this group of processes, if any: two groups may use one address."""
    if named := environ.get(RUN_ID) or environ.get("OMPI_MCA_orte_hnp_uri", "").partition(";")[0]:
        return named
    return _slurm_step(environ) if _look(environ, "SLURM_STEP_NUM_TASKS") else ""


def _local_devices(environ: Environ, starters: Iterable[_Starter]) -> Found | None:
    """Which accelerators this process uses: those of JAX_LOCAL_DEVICE_IDS, or one for each process of the host."""
    if said := _look(environ, "JAX_LOCAL_DEVICE_IDS"):
        return said
    for starter in starters:
        local = _look(environ, starter.local)
        if local is None:
            continue
        # A scheduler that shows each process one device has already assigned it.
        chosen = len(environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and environ.get("CUDA_VISIBLE_DEVICES")
        shared = re.match(r"\d+", environ.get(starter.locals or "", ""))
        return None if chosen or shared is None or shared[0] == "1" else local
    return None


def _device_ids(found: Found) -> tuple[int, ...]:
    return tuple(_number(Found(part.strip(), found.variable), least=0) for part in found.value.split(","))


def _look(environ: Environ, variable: str | None) -> Found | None:
    """An empty variable counts as not set."""
    value = environ.get(variable, "").strip() if variable else ""
    return Found(value, variable) if value and variable else None


def _missing(address: Found | None, count: Found | None, process: Found | None) -> InputError:
    wanted = {
        "the coordinator's address (JAX_COORDINATOR_ADDRESS)": address,
        "the number of processes (JAX_NUM_PROCESSES)": count,
        "this process's id (JAX_PROCESS_ID)": process,
    }
    found = ", ".join(each.variable for each in wanted.values() if each)
    missing = " and ".join(name for name, each in wanted.items() if each is None)
    return InputError(f"environment: {found} set but not {missing}; set all three, or none for a single process")


def _number(found: Found, *, least: int) -> int:
    if not found.value.isdecimal() or int(found.value) < least:
        raise InputError(f"{found.variable}={show(found.value)}: expected a whole number from {least}")
    return int(found.value)


def _torchrun_address(environ: Environ) -> Found | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return Found(f"{host}:{port}", "MASTER_ADDR, MASTER_PORT") if host and port else None


def _open_mpi_address(environ: Environ) -> Found | None:
    """The loopback if all ranks are on one machine, otherwise the machine of mpirun, which runs rank 0."""
    size, uri = environ.get("OMPI_COMM_WORLD_SIZE"), environ.get("OMPI_MCA_orte_hnp_uri", "")
    if size and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        return Found(f"{LOOPBACK}:{_port_of(uri)}", "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = re.search(r"tcp6?://\[?([^\],;]+)\]?[,:]", uri)
    return Found(f"{host[1]}:{_port_of(uri)}", "OMPI_MCA_orte_hnp_uri") if host else None


def _slurm_address(environ: Environ) -> Found | None:
    """The first node of the step, which runs its process 0, and a port of the step's own: a job may have several."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environ.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        return None
    host = LOOPBACK if environ.get("SLURM_STEP_NUM_NODES") == "1" else first[1] + (first[2] or "")
    return Found(f"{host}:{_port_of(_slurm_step(environ))}", "SLURM_STEP_NODELIST")


def _slurm_step(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"


def _pmi_address(environ: Environ) -> Found | None:
    """The loopback if all ranks are on one machine; PMI names no host."""
    size = environ.get("PMI_SIZE")
    if not size or environ.get("MPI_LOCALNRANKS") != size:
        return None
    # The ranks of one machine have the same parent, a proxy.
    return Found(f"{LOOPBACK}:{_port_of(str(os.getppid()))}", "MPI_LOCALNRANKS")


def _port_of(job: str) -> int:
    """A port that all processes of a job derive alike, below the range of ephemeral ports."""
    return 10000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 20000


# Open MPI before SLURM: inside an allocation, mpirun passes SLURM's variables of its own helper processes to the ranks.
# SLURM's variables count only within a step of srun: a batch script is one process, whatever is allocated to it.
_STARTERS = (
    _Starter("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", lambda environ: _look(environ, "JAX_COORDINATOR_ADDRESS")),
    _Starter("RANK", "WORLD_SIZE", _torchrun_address, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Starter(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        _open_mpi_address,
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Starter(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        _slurm_address,
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        sign="SLURM_STEP_NUM_TASKS",
    ),
    _Starter("PMI_RANK", "PMI_SIZE", _pmi_address, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Starter("JOB_COMPLETION_INDEX"),
)
