"""The environment variables that each launcher and scheduler sets for the processes that it starts.

Sources: the documentation of SLURM (srun), Open MPI 4 and 5, Intel MPI, torchrun, AWS Batch (multi-node parallel jobs)
and SkyPilot (distributed jobs); the source of Kubeflow's Trainer and Training Operator 1.9, of xpk and of submitit.
`tpu.py` has those for TPUs.
"""

import hashlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxddp.core.errors import InputError
from jaxddp.job import tpu
from jaxddp.job.env_variables import INDEX, Environ, EnvValue, lookup, number
from jaxddp.wire.messages import LOOPBACK, is_loopback

Lookup = Callable[[Environ], EnvValue | None]
_MOST_ANCESTORS = 1000


def variable(name: str) -> Lookup:
    """Return a lookup of one variable."""
    return lambda environ: lookup(environ, name)


def no_value(environ: Environ) -> EnvValue | None:
    """Return None. This is the lookup of a value that a scheduler does not set."""
    return None


@dataclass(frozen=True)
class Scheduler:
    """The lookups of a process's job and id in the environment variables of a scheduler.

    The lookups are functions, because most schedulers have no variable for some of the values.
    """

    process: Lookup
    count: Lookup = no_value
    address: Lookup = no_value
    """Returns the `host:port` of the coordinator."""
    run_id: Callable[[Environ], str] = lambda environ: ""
    """Returns a text that is equal in all processes of a job, and differs between jobs; empty if there is none."""
    local: tuple[str, str] | None = None
    """The variables with the local rank of this process and the number of processes on the host, if each process has
    its own accelerator. In SLURM's `2(x3),1`, the first number is used."""
    binds_gpus: Callable[[Environ, int], bool] = lambda environ, visible: False
    """Returns whether each process sees only its own GPUs, given the number of GPUs that this process sees."""
    marker: str | None = None
    """If this variable is not set, the scheduler is ignored, because other programs may set its other variables."""


def port_of(job: str) -> int:
    """Return a port below the ephemeral ports, which is the same in all processes of a job."""
    return 10000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 20000


def reachable_address() -> str:
    """Return the IPv4 address at which other machines reach this machine. Raises InputError if there is none."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = LOOPBACK
    if not is_loopback(named):
        return named
    # Debian maps the host name to a loopback address. Connecting a UDP socket selects an interface, and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chooser:
        try:
            chooser.connect(("192.0.2.1", 1))
        except OSError as error:
            advice = "set JAX_COORDINATOR_ADDRESS to process 0's host:port"
            raise InputError("this machine has no address that others reach", advice=advice) from error
        return chooser.getsockname()[0]


def _open_mpi_job(environ: Environ) -> str:
    """Return mpirun's id of the job: the URI in version 4, or the namespace in version 5."""
    return environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_NAMESPACE", "")


def _open_mpi_address(environ: Environ) -> EnvValue | None:
    """Return the loopback address if all ranks are on one machine, else the host of mpirun, which runs rank 0."""
    size, job = environ.get("OMPI_COMM_WORLD_SIZE"), _open_mpi_job(environ)
    if size and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        return EnvValue(f"{LOOPBACK}:{port_of(job)}", "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = re.search(r"tcp6?://\[?([^\],;]+)\]?[,:]", job)
    return EnvValue(f"{host[1]}:{port_of(job)}", "OMPI_MCA_orte_hnp_uri") if host else None


def _slurm_step(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"


def _slurm_process(environ: Environ) -> EnvValue | None:
    """Return the task's id in a step of srun; None for a batch script, which also has id 0 but is a single process."""
    task = lookup(environ, "SLURM_PROCID")
    return task if task and (task.value != "0" or lookup(environ, "SLURM_STEP_ID")) else None


def _slurm_address(environ: Environ) -> EnvValue | None:
    """Return the host of the step's first node, which runs process 0, with a port that differs between steps."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environ.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        return None
    host = LOOPBACK if environ.get("SLURM_STEP_NUM_NODES") == "1" else first[1] + (first[2] or "")
    return EnvValue(f"{host}:{port_of(_slurm_step(environ))}", "SLURM_STEP_NODELIST")


def _slurm_binds_gpus(environ: Environ, visible: int) -> bool:
    """Return whether SLURM shows each task its own GPUs. With `--gpu-bind=none`, a task sees more than its own."""
    binding = ",".join(environ.get(name, "") for name in ("SLURM_GPU_BIND", "SLURM_TRES_BIND"))
    own = [
        *environ.get("SLURM_GPUS_PER_TASK", "").split(","),
        *re.findall(r"gpu[^,]*", environ.get("SLURM_TRES_PER_TASK", "")),
        *re.findall(r"per_task:[0-9]+", binding),
    ]
    # The number may follow the type of the GPUs, as in `a100:2`.
    return "mask_gpu" in binding or any(re.fullmatch(rf"(.*[:=])?{visible}", value) for value in own)


def _pmi_address(environ: Environ) -> EnvValue | None:
    """Return the loopback address if all ranks are on one machine, else None, because PMI sets no host."""
    size = environ.get("PMI_SIZE")
    if not size or environ.get("MPI_LOCALNRANKS") != size:
        return None
    # The ranks on one machine have the same launcher, but each may have its own wrapper.
    return EnvValue(f"{LOOPBACK}:{port_of(str(launcher_of('PMI_RANK')))}", "MPI_LOCALNRANKS")


def _submitit_address(environ: Environ) -> EnvValue | None:
    """Return the address for submitit's local executor, which has one machine. Its SLURM executor uses srun."""
    job = lookup(environ, "SUBMITIT_LOCAL_JOB_ID")
    return EnvValue(f"{LOOPBACK}:{port_of(job.value)}", job.variable) if job else None


def _batch_job(environ: Environ) -> str:
    """Return the job id and attempt of AWS Batch. The variable of the job id holds `JOB#NODE`."""
    job = environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
    return f"{job}.{environ.get('AWS_BATCH_JOB_ATTEMPT', '')}" if job else ""


def _batch_process(environ: Environ) -> EnvValue | None:
    """Return the node's index. The main node, with which the job ends, swaps its index with node 0 to be process 0."""
    node = lookup(environ, "AWS_BATCH_JOB_NODE_INDEX")
    main = lookup(environ, "AWS_BATCH_JOB_MAIN_NODE_INDEX")
    if node is None or main is None:
        return node
    first = number(main, INDEX)
    swapped = {first: 0, 0: first}
    index = number(node, INDEX)
    return EnvValue(str(swapped.get(index, index)), f"{node.variable}, {main.variable}")


def _batch_address(environ: Environ) -> EnvValue | None:
    """Return the main node's private address. On the main node, AWS Batch does not set the variable."""
    main = lookup(environ, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    if main is None:
        node, first = (lookup(environ, f"AWS_BATCH_JOB_{which}_INDEX") for which in ("NODE", "MAIN_NODE"))
        if node is None or first is None or node.value != first.value:
            return None
        main = EnvValue(reachable_address(), first.variable)
    return EnvValue(f"{main.value}:{port_of(_batch_job(environ))}", main.variable)


def _skypilot_address(environ: Environ) -> EnvValue | None:
    """Return the address of the head node, which has rank 0 and is first in the list of nodes."""
    nodes = lookup(environ, "SKYPILOT_NODE_IPS")
    if nodes is None:
        return None
    return EnvValue(f"{nodes.value.split()[0]}:{port_of(environ.get('SKYPILOT_TASK_ID', ''))}", nodes.variable)


def _tpu_address(environ: Environ) -> EnvValue | None:
    """Return the first host of slice 0, with a port that is equal on all hosts, where one job at a time runs."""
    first = tpu.coordinator(environ)
    return EnvValue(f"{first.value}:{port_of(first.value)}", first.variable) if first else None


def _host_and_port(host: str, port: str) -> Lookup:
    """Return a lookup of an address from a variable with the host and a variable with the port."""

    def address(environ: Environ) -> EnvValue | None:
        values = lookup(environ, host), lookup(environ, port)
        return EnvValue(f"{values[0].value}:{values[1].value}", f"{host}, {port}") if values[0] and values[1] else None

    return address


def _jax_address(environ: Environ) -> EnvValue | None:
    """Return the address in JAX's variable. xpk sets the port in a second variable."""
    address = lookup(environ, "JAX_COORDINATOR_ADDRESS")
    if address is None or ":" in address.value:
        return address
    return _host_and_port("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT")(environ) or address


def _torchrun_address(environ: Environ) -> EnvValue | None:
    address = _host_and_port("MASTER_ADDR", "MASTER_PORT")(environ)
    if address is None or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return address
    # torchrun's agent listens at this port for torch's rendezvous.
    return address._replace(value=f"{address.value.rpartition(':')[0]}:{port_of(address.value)}")


TPU = Scheduler(tpu.process, tpu.process_count, _tpu_address)
"""The variables of GKE's TPU nodes and the metadata of TPU VMs. libtpu numbers the hosts in the same way."""
EXPLICIT = Scheduler(variable("JAX_PROCESS_ID"), variable("JAX_NUM_PROCESSES"), _jax_address)
"""The variables that `jaxddp launch`, Kubeflow's JAX runtime or a user sets. They take precedence."""

# The first entry with an id for this process is the scheduler that started it. A launcher inside a job passes on the
# variables of the job, so torchrun and MPI come before SLURM. For example, mpirun starts its daemons with srun, so its
# ranks also have SLURM's variables. The schedulers that start one process on each node come last.
SCHEDULERS = (
    EXPLICIT,
    Scheduler(
        variable("RANK"),
        variable("WORLD_SIZE"),
        _torchrun_address,
        lambda environ: environ.get("TORCHELASTIC_RUN_ID", ""),
        local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ),
    Scheduler(
        variable("OMPI_COMM_WORLD_RANK"),
        variable("OMPI_COMM_WORLD_SIZE"),
        _open_mpi_address,
        lambda environ: _open_mpi_job(environ).partition(";")[0],
        local=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    Scheduler(
        variable("SUBMITIT_LOCAL_GLOBALID"),
        variable("SUBMITIT_LOCAL_NTASKS"),
        _submitit_address,
        lambda environ: environ.get("SUBMITIT_LOCAL_JOB_ID", ""),
        local=("SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS"),
    ),
    Scheduler(
        _slurm_process,
        variable("SLURM_STEP_NUM_TASKS"),
        _slurm_address,
        _slurm_step,
        local=("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        binds_gpus=_slurm_binds_gpus,
    ),
    Scheduler(variable("PMI_RANK"), variable("PMI_SIZE"), _pmi_address, local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    # The schedulers below start one process on each node, with all GPUs or TPU chips of the node. TPU comes first,
    # because libtpu numbers the processes, and other schedulers may number the hosts in another order.
    TPU,
    # Kubeflow's torch runtime, and Kubeflow's older JAXJob.
    Scheduler(variable("PET_NODE_RANK"), variable("PET_NNODES"), _host_and_port("PET_MASTER_ADDR", "PET_MASTER_PORT")),
    Scheduler(
        variable("PROCESS_ID"),
        variable("NUM_PROCESSES"),
        _host_and_port("COORDINATOR_ADDRESS", "COORDINATOR_PORT"),
        marker="COORDINATOR_ADDRESS",
    ),
    # xpk sets the address in JAX's variables.
    Scheduler(variable("NODE_RANK"), variable("NNODES"), marker="JOBSET_NAME"),
    Scheduler(
        variable("SKYPILOT_NODE_RANK"),
        variable("SKYPILOT_NUM_NODES"),
        _skypilot_address,
        lambda environ: environ.get("SKYPILOT_TASK_ID", ""),
    ),
    Scheduler(_batch_process, variable("AWS_BATCH_JOB_NUM_NODES"), _batch_address, _batch_job),
    # A Kubernetes Indexed Job sets only the process id.
    Scheduler(variable("JOB_COMPLETION_INDEX")),
)


def launcher_of(variable: str, proc: Path = Path("/proc")) -> int:
    """Return the id of the nearest ancestor that was started without an environment variable, which it sets itself.

    If the ancestors cannot be read, return the id of the parent process.

    Args:
        proc: the folder with the processes of the kernel.
    """
    parent = process = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        try:
            if not _has(variable, proc / str(process) / "environ"):
                return process
            process = _parent(proc / str(process) / "stat")
        except OSError:
            # A wrapper belongs to the user of this process, who may read it, so this is the launcher.
            return process
        except (ValueError, IndexError):
            break
    return parent


def _has(variable: str, environ: Path) -> bool:
    return any(setting.startswith(f"{variable}=".encode()) for setting in environ.read_bytes().split(b"\0"))


def _parent(stat: Path) -> int:
    # The name of the program, in parentheses, may contain any character.
    return int(stat.read_bytes().rpartition(b")")[2].split()[1])
