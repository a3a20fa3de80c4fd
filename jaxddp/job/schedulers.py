"""What each launcher and scheduler tells the processes that it starts, in its environment variables.

Sources: the documentation of SLURM (srun), Open MPI 4 and 5, Intel MPI, torchrun, AWS Batch (multi-node parallel jobs)
and SkyPilot (distributed jobs); the source of Kubeflow's Trainer and Training Operator 1.9, of xpk and of submitit.
"""

import hashlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from jaxddp.core.errors import InputError
from jaxddp.job.ports import LOOPBACK, is_loopback
from jaxddp.job.variables import INDEX, Environ, Found, look, number

Lookup = Callable[[Environ], Found | None]


def variable(name: str) -> Lookup:
    """What one variable holds."""
    return lambda environ: look(environ, name)


def nothing(environ: Environ) -> Found | None:
    """Of what a starter does not tell."""
    return None


@dataclass(frozen=True)
class Scheduler:
    """How the place of a process in its job is read; by functions, since few starters have a variable for each part."""

    process: Lookup
    count: Lookup = nothing
    address: Lookup = nothing
    """Of the coordinator, `host:port`."""
    run_id: Callable[[Environ], str] = lambda environ: ""
    """What all processes of this job, and no other job's, are told; empty where there is nothing."""
    local: str | None = None
    """The variable for this process's number on its host, where each process has its own accelerator."""
    locals: str | None = None
    """The variable for how many processes share the host; of SLURM's `2(x3),1`, the first number."""
    sign: str | None = None
    """The other variables count only where this one is set: their names may mean something else."""


def port_of(job: str) -> int:
    """A port that all processes of a job derive alike, below the range of ephemeral ports."""
    return 10000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 20000


def own_address() -> str:
    """The IPv4 address by which other machines reach this one. Raises: InputError; it has none."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = LOOPBACK
    if not is_loopback(named):
        return named
    # Debian maps the name to a loopback. Connecting a datagram socket sends nothing, and chooses the interface.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chooser:
        try:
            chooser.connect(("192.0.2.1", 1))
        except OSError as error:
            raise InputError(
                "this machine has no address that others reach; set JAX_COORDINATOR_ADDRESS to process 0's host:port"
            ) from error
        return chooser.getsockname()[0]


def _torchrun_address(environ: Environ) -> Found | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not (host and port):
        return None
    # torchrun's agent listens at that port itself, for torch's processes, which meet there.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = port_of(f"{host}:{port}")
    return Found(f"{host}:{port}", "MASTER_ADDR, MASTER_PORT")


def _open_mpi_job(environ: Environ) -> str:
    """What mpirun calls the job: of version 4, or of 5, which has no such URI."""
    return environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_NAMESPACE", "")


def _open_mpi_address(environ: Environ) -> Found | None:
    """The loopback if all ranks are on one machine, otherwise the machine of mpirun, which runs rank 0."""
    size, job = environ.get("OMPI_COMM_WORLD_SIZE"), _open_mpi_job(environ)
    if size and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        return Found(f"{LOOPBACK}:{port_of(job)}", "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = re.search(r"tcp6?://\[?([^\],;]+)\]?[,:]", job)
    return Found(f"{host[1]}:{port_of(job)}", "OMPI_MCA_orte_hnp_uri") if host else None


def _slurm_step(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"


def _slurm_process(environ: Environ) -> Found | None:
    """Within a step of srun: a batch script, to which SLURM gives number 0, is one process, whatever is allocated."""
    task = look(environ, "SLURM_PROCID")
    return task if task and (task.value != "0" or look(environ, "SLURM_STEP_ID")) else None


def _slurm_address(environ: Environ) -> Found | None:
    """The first node of the step, which runs its process 0, and a port of the step's own: a job may have several."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environ.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        return None
    host = LOOPBACK if environ.get("SLURM_STEP_NUM_NODES") == "1" else first[1] + (first[2] or "")
    return Found(f"{host}:{port_of(_slurm_step(environ))}", "SLURM_STEP_NODELIST")


def _pmi_address(environ: Environ) -> Found | None:
    """The loopback if all ranks are on one machine; PMI names no host."""
    size = environ.get("PMI_SIZE")
    if not size or environ.get("MPI_LOCALNRANKS") != size:
        return None
    # The ranks of one machine have the same parent, a proxy.
    return Found(f"{LOOPBACK}:{port_of(str(os.getppid()))}", "MPI_LOCALNRANKS")


def _submitit_address(environ: Environ) -> Found | None:
    """Submitit's local executor has one machine; its SLURM executor leaves all to srun."""
    job = look(environ, "SUBMITIT_LOCAL_JOB_ID")
    return Found(f"{LOOPBACK}:{port_of(job.value)}", job.variable) if job else None


def _batch_job(environ: Environ) -> str:
    """The attempt of a job of AWS Batch; a node of it is named `JOB#NODE`."""
    job = environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
    return f"{job}.{environ.get('AWS_BATCH_JOB_ATTEMPT', '')}" if job else ""


def _batch_process(environ: Environ) -> Found | None:
    """The node's index, but the main node, whose end is the job's, is process 0 and changes places with node 0."""
    node = look(environ, "AWS_BATCH_JOB_NODE_INDEX")
    main = look(environ, "AWS_BATCH_JOB_MAIN_NODE_INDEX")
    if node is None or main is None:
        return node
    first = number(main, INDEX)
    swapped = {first: 0, 0: first}
    index = number(node, INDEX)
    return Found(str(swapped.get(index, index)), f"{node.variable}, {main.variable}")


def _batch_address(environ: Environ) -> Found | None:
    """The main node's private address, which the main node itself is not told."""
    main = look(environ, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    if main is None:
        node, first = (look(environ, f"AWS_BATCH_JOB_{which}_INDEX") for which in ("NODE", "MAIN_NODE"))
        if node is None or first is None or node.value != first.value:
            return None
        main = Found(own_address(), first.variable)
    return Found(f"{main.value}:{port_of(_batch_job(environ))}", main.variable)


def _skypilot_address(environ: Environ) -> Found | None:
    """The first of the nodes' addresses, a line each: the head node's, which has rank 0."""
    nodes = look(environ, "SKYPILOT_NODE_IPS")
    if nodes is None:
        return None
    return Found(f"{nodes.value.split()[0]}:{port_of(environ.get('SKYPILOT_TASK_ID', ''))}", nodes.variable)


def _beside(host: str, port: str) -> Lookup:
    """The address whose host and port are in two variables."""

    def address(environ: Environ) -> Found | None:
        found = look(environ, host), look(environ, port)
        return Found(f"{found[0].value}:{found[1].value}", f"{host}, {port}") if found[0] and found[1] else None

    return address


def _given_address(environ: Environ) -> Found | None:
    """JAX's own variable, to which xpk adds the port in another one."""
    address = look(environ, "JAX_COORDINATOR_ADDRESS")
    if address is None or ":" in address.value:
        return address
    return _beside("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT")(environ) or address


EXPLICIT = Scheduler(variable("JAX_PROCESS_ID"), variable("JAX_NUM_PROCESSES"), _given_address)
"""`jaxddp launch`, Kubeflow's JAX runtime, or a person: nothing comes before these."""

# The first that gives this process a number has started it. Each passes on the variables of what it runs in, so what
# starts processes within another's job comes before that: torchrun and MPI before SLURM (whose variables are those of
# mpirun's own helpers there), and all of them before what starts one process a node.
SCHEDULERS = (
    EXPLICIT,
    Scheduler(
        variable("RANK"),
        variable("WORLD_SIZE"),
        _torchrun_address,
        lambda environ: environ.get("TORCHELASTIC_RUN_ID", ""),
        local="LOCAL_RANK",
        locals="LOCAL_WORLD_SIZE",
    ),
    Scheduler(
        variable("OMPI_COMM_WORLD_RANK"),
        variable("OMPI_COMM_WORLD_SIZE"),
        _open_mpi_address,
        lambda environ: _open_mpi_job(environ).partition(";")[0],
        local="OMPI_COMM_WORLD_LOCAL_RANK",
        locals="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Scheduler(
        variable("SUBMITIT_LOCAL_GLOBALID"),
        variable("SUBMITIT_LOCAL_NTASKS"),
        _submitit_address,
        lambda environ: environ.get("SUBMITIT_LOCAL_JOB_ID", ""),
        local="SUBMITIT_LOCAL_LOCALID",
        locals="SUBMITIT_LOCAL_NTASKS",
    ),
    Scheduler(
        _slurm_process,
        variable("SLURM_STEP_NUM_TASKS"),
        _slurm_address,
        _slurm_step,
        local="SLURM_LOCALID",
        locals="SLURM_STEP_TASKS_PER_NODE",
    ),
    Scheduler(
        variable("PMI_RANK"),
        variable("PMI_SIZE"),
        _pmi_address,
        local="MPI_LOCALRANKID",
        locals="MPI_LOCALNRANKS",
    ),
    # From here on one process a node, with all GPUs of it. Kubeflow: the torch runtime, and JAXJob of before.
    Scheduler(variable("PET_NODE_RANK"), variable("PET_NNODES"), _beside("PET_MASTER_ADDR", "PET_MASTER_PORT")),
    Scheduler(
        variable("PROCESS_ID"),
        variable("NUM_PROCESSES"),
        _beside("COORDINATOR_ADDRESS", "COORDINATOR_PORT"),
        sign="COORDINATOR_ADDRESS",
    ),
    # xpk, whose address is in JAX's variables.
    Scheduler(variable("NODE_RANK"), variable("NNODES"), sign="JOBSET_NAME"),
    Scheduler(
        variable("SKYPILOT_NODE_RANK"),
        variable("SKYPILOT_NUM_NODES"),
        _skypilot_address,
        lambda environ: environ.get("SKYPILOT_TASK_ID", ""),
    ),
    Scheduler(_batch_process, variable("AWS_BATCH_JOB_NUM_NODES"), _batch_address, _batch_job),
    # An Indexed Job of Kubernetes does not say how many there are.
    Scheduler(variable("JOB_COMPLETION_INDEX")),
)
