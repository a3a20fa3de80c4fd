"""The environment variables that each launcher and scheduler sets for the processes that it starts.

Sources: the documentation of SLURM (srun), Open MPI 4 and 5, Intel MPI, torchrun, AWS Batch (multi-node parallel jobs)
and SkyPilot (distributed jobs); the source of Kubeflow's Trainer and Training Operator 1.9, of xpk and of submitit.
`tpu.py` has those for TPUs.
"""

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxddp.core.errors import InputError
from jaxddp.job import tpu
from jaxddp.job.env_variables import INDEX, Environ, EnvValue, Lookup, lookup, number
from jaxddp.job.messages import LOOPBACK


@dataclass(frozen=True)
class Scheduler:
    """Where the variables of a scheduler have a process's job and id. A scheduler may not set all of the values."""

    process: Lookup
    count: Lookup = ""
    address: Lookup = ""
    """The `host:port` of the coordinator."""
    host: Lookup = ""
    """In place of `address`, the host of the coordinator. The port follows from `run_id`, or else from the host."""
    run_id: Lookup = ""
    """A text that is equal in all processes of a job, and differs between jobs."""
    local: tuple[str, Lookup] = ("", "")
    """Where the local rank of this process and the number of processes on the host are, if each process has its own
    accelerator."""
    binds_gpus: Callable[[Environ, int], bool] = lambda environ, visible: False
    """Returns whether each process sees only its own GPUs, given the number of GPUs that this process sees."""
    marker: str = ""
    """If this variable is not set, the scheduler is ignored, because other programs may set its other variables."""

    def coordinator(self, environ: Environ) -> EnvValue | None:
        """Return the `host:port` of the coordinator, if it is known."""
        host = lookup(environ, self.host)
        if host is None:
            return lookup(environ, self.address)
        return host._replace(value=f"{host.value}:{port_of((lookup(environ, self.run_id) or host).value)}")


def port_of(job: str) -> int:
    """Return a port below the ephemeral ports, which is the same in all processes of a job."""
    return 10000 + int(hashlib.sha256(job.encode()).hexdigest(), 16) % 20000


def reachable_address() -> str:
    """Return the IPv4 address at which other machines reach this machine. Raises InputError if there is none."""
    # Debian maps the host name to a loopback address. Connecting a UDP socket selects an interface, and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chooser:
        try:
            chooser.connect(("192.0.2.1", 1))
        except OSError as error:
            advice = "set JAX_COORDINATOR_ADDRESS to process 0's host:port"
            raise InputError("this machine has no address that others reach", advice=advice) from error
        return chooser.getsockname()[0]


def _loopback(environ: Environ, size: str, local_size: str) -> EnvValue | None:
    """Return the loopback address if all processes are on one machine, by the variables with their numbers."""
    is_local = environ.get(size) and environ.get(size) == environ.get(local_size)
    return EnvValue(LOOPBACK, local_size) if is_local else None


def _open_mpi_job(environ: Environ) -> EnvValue | None:
    """Return mpirun's id of the job: the URI in version 4, or the namespace in version 5, `prterun-HOST-PID@1`."""
    return lookup(environ, "OMPI_MCA_orte_hnp_uri") or lookup(environ, "PMIX_NAMESPACE")


def _open_mpi_host(environ: Environ) -> EnvValue | None:
    """Return the loopback address if all ranks are on one machine, else the host of mpirun, which runs rank 0."""
    job = _open_mpi_job(environ)
    host = re.search(r"tcp6?://\[?([^\],;]+)\]?[,:]|^[^-]+-(.+)-[0-9]+@[0-9]+$", job.value if job else "")
    first = job._replace(value=host[1] or host[2]) if job and host else None
    return _loopback(environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE") or first


def _slurm_process(environ: Environ) -> EnvValue | None:
    """Return the task's id in a step of srun; None for a batch script, which also has id 0 but is a single process."""
    task = lookup(environ, "SLURM_PROCID")
    return task if task and (task.value != "0" or lookup(environ, "SLURM_STEP_ID")) else None


def _slurm_host(environ: Environ) -> EnvValue | None:
    """Return the host of the step's first node, which runs process 0."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environ.get("SLURM_STEP_NODELIST", ""))
    host = LOOPBACK if environ.get("SLURM_STEP_NUM_NODES") == "1" else first and first[1] + (first[2] or "")
    return EnvValue(host, "SLURM_STEP_NODELIST") if first and host else None


def _slurm_local_count(environ: Environ) -> EnvValue | None:
    """Return the number of tasks on this node. SLURM has the numbers of all nodes of the step, such as `2(x3),1`."""
    tasks, node = (lookup(environ, name) for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"))
    runs = re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", tasks.value if tasks else "")
    counts = [count for count, nodes in runs for _ in range(int(nodes or 1))]
    index = number(node, INDEX) if node else 0
    return tasks._replace(value=counts[index]) if tasks and index < len(counts) else tasks


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
    host = _loopback(environ, "PMI_SIZE", "MPI_LOCALNRANKS")
    # The ranks on one machine have the same launcher, but each may have its own wrapper.
    return host and host._replace(value=f"{host.value}:{port_of(str(pmi_launcher()))}")


def _submitit_host(environ: Environ) -> EnvValue | None:
    """Return the host for submitit's local executor, which has one machine. Its SLURM executor uses srun."""
    job = lookup(environ, "SUBMITIT_LOCAL_JOB_ID")
    return job and job._replace(value=LOOPBACK)


def _batch_job(environ: Environ) -> EnvValue | None:
    """Return the job id and attempt of AWS Batch. The variable of the job id holds `JOB#NODE`."""
    job = lookup(environ, "AWS_BATCH_JOB_ID")
    return job and job._replace(value=f"{job.value.partition('#')[0]}.{environ.get('AWS_BATCH_JOB_ATTEMPT', '')}")


def _batch_process(environ: Environ) -> EnvValue | None:
    """Return the node's index. The main node, with which the job ends, swaps its index with node 0 to be process 0."""
    node = lookup(environ, "AWS_BATCH_JOB_NODE_INDEX")
    main = lookup(environ, "AWS_BATCH_JOB_MAIN_NODE_INDEX")
    if node is None or main is None:
        return node
    swapped = {main.value: "0", "0": main.value}
    return EnvValue(swapped.get(node.value, node.value), f"{node.variable}, {main.variable}")


def _batch_host(environ: Environ) -> EnvValue | None:
    """Return the main node's private address. On the main node, AWS Batch does not set the variable."""
    main, process = lookup(environ, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"), _batch_process(environ)
    is_main = main is None and process is not None and process.value == "0"
    return EnvValue(reachable_address(), "AWS_BATCH_JOB_MAIN_NODE_INDEX") if is_main else main


def _skypilot_host(environ: Environ) -> EnvValue | None:
    """Return the address of the head node, which has rank 0 and is first in the list of nodes."""
    nodes = lookup(environ, "SKYPILOT_NODE_IPS")
    return nodes and nodes._replace(value=nodes.value.split()[0])


def _jax_address(environ: Environ) -> EnvValue | None:
    """Return the address in JAX's variable. xpk sets the port in a second variable."""
    address = lookup(environ, "JAX_COORDINATOR_ADDRESS")
    has_port = address is None or ":" in address.value
    return address if has_port else lookup(environ, "JAX_COORDINATOR_ADDRESS, JAX_COORDINATOR_PORT") or address


def _torchrun_address(environ: Environ) -> EnvValue | None:
    address = lookup(environ, "MASTER_ADDR, MASTER_PORT")
    if address is None or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return address
    # torchrun's agent listens at this port for torch's rendezvous.
    return address._replace(value=f"{address.value.rpartition(':')[0]}:{port_of(address.value)}")


TPU = Scheduler(
    lambda environ: tpu.place(environ).process,
    lambda environ: tpu.place(environ).num_hosts,
    host=lambda environ: tpu.place(environ).first,
)
"""The variables of GKE's TPU nodes and the metadata of TPU VMs. libtpu numbers the hosts in the same way. On a host,
one job at a time runs."""
EXPLICIT = Scheduler("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", _jax_address)
"""The variables that `jaxddp launch`, Kubeflow's JAX runtime or a user sets. They take precedence."""

# The first entry with an id for this process is the scheduler that started it. A launcher inside a job passes on the
# variables of the job, so torchrun and MPI come before SLURM. For example, mpirun starts its daemons with srun, so its
# ranks also have SLURM's variables. The schedulers that start one process on each node come last.
SCHEDULERS = (
    EXPLICIT,
    Scheduler(
        "RANK", "WORLD_SIZE", _torchrun_address, run_id="TORCHELASTIC_RUN_ID", local=("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ),
    Scheduler(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        host=_open_mpi_host,
        run_id=_open_mpi_job,
        local=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    Scheduler(
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        host=_submitit_host,
        run_id="SUBMITIT_LOCAL_JOB_ID",
        local=("SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS"),
    ),
    Scheduler(
        _slurm_process,
        "SLURM_STEP_NUM_TASKS",
        host=_slurm_host,
        run_id="SLURM_JOB_ID, SLURM_STEP_ID",
        local=("SLURM_LOCALID", _slurm_local_count),
        binds_gpus=_slurm_binds_gpus,
    ),
    Scheduler("PMI_RANK", "PMI_SIZE", _pmi_address, local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    # On HPE Cray systems, PMI has other variables for the local rank.
    Scheduler("PMI_RANK", "PMI_SIZE", local=("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    # The schedulers below start one process on each node, with all GPUs or TPU chips of the node. TPU comes first,
    # because libtpu numbers the processes, and other schedulers may number the hosts in another order.
    TPU,
    # Kubeflow's torch runtime, and Kubeflow's older JAXJob.
    Scheduler("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR, PET_MASTER_PORT"),
    Scheduler("PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS, COORDINATOR_PORT", marker="COORDINATOR_ADDRESS"),
    # xpk sets the address in JAX's variables.
    Scheduler("NODE_RANK", "NNODES", marker="JOBSET_NAME"),
    Scheduler("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", host=_skypilot_host, run_id="SKYPILOT_TASK_ID"),
    Scheduler(_batch_process, "AWS_BATCH_JOB_NUM_NODES", host=_batch_host, run_id=_batch_job),
    # A Kubernetes Indexed Job sets only the process id.
    Scheduler("JOB_COMPLETION_INDEX"),
)


def pmi_launcher(proc: Path = Path("/proc")) -> int:
    """Return the id of the nearest ancestor that was started without `PMI_RANK`, which it sets itself.

    An ancestor that cannot be read is the launcher, because a wrapper belongs to the user of this process. `proc` is
    the folder with the processes of the kernel.
    """
    process = os.getppid()
    with contextlib.suppress(OSError):
        while b"\0PMI_RANK=" in b"\0" + (proc / str(process) / "environ").read_bytes():
            # The name of the program, in parentheses, may contain any character.
            process = int((proc / str(process) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return process
