"""The checks of a machine before a run. Each check returns a `Finding`, or raises an error if it fails."""

import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jaxddp.core.files as files
from jaxddp.cluster.doctor.allreduce import bus_bandwidth, check_sum, time_all_reduce
from jaxddp.cluster.machine import local_cores, local_gpus
from jaxddp.config import ParallelConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.core.libraries import installed_version
from jaxddp.core.peers import Peers
from jaxddp.core.tpu import local_chips
from jaxddp.core.wording import counted, size
from jaxddp.job.environment import Job, find_job
from jaxddp.job.tpu import accelerator_type
from jaxddp.mesh import Topology
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RecipeFile
from jaxddp.setup.resources import join_job
from jaxddp.training.listeners.step_seconds import FILE, StepSeconds
from jaxddp.workdir.session import check_shared

Verdict = Literal["ok", "warn", "fail"]
PACKAGES = ("jaxddp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow")
_SIZES = {"4 kB": 4_000, "1 MB": 1_000_000, "16 MB": 16_000_000, "100 MB": 100_000_000}
_LARGEST_ON_CPU = 16_000_000


@dataclass(frozen=True)
class Finding:
    """The result of a check: a line for the user, and a value for later checks."""

    detail: str
    value: Any = None
    verdict: Verdict = "ok"


def environment() -> Finding:
    """Find the job of this process. The value is a list that holds the job, or an empty list for a single process."""
    job, cores = find_job(), len(local_cores())
    machine = f"{platform.node()}, {cores} core{'s' * (cores > 1)}"
    if job is not None:
        return Finding(f"{machine}: {job}", [job])
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_STEP_ID" not in os.environ:
        advice = f"SLURM has {tasks} tasks for this job; start them with srun"
        return Finding(f"{machine}: a single process; {advice}", [], "warn")
    return Finding(f"{machine}: a single process (no launcher's variables)", [])


def coordinator(job: Job | None, parallel: ParallelConfig, is_described: bool) -> Finding:
    """Simulate the config's number of CPU devices, if any, and join the job. The value is the peers of this process.

    Args:
        is_described: whether the check of the environment variables succeeded.
    """
    begin = time.monotonic()
    peers = join_job(job, parallel)
    if not is_described:
        return Finding("not joined: the environment variables do not describe the job", peers, "fail")
    if job is None:
        return Finding("not in a job", peers)
    seconds = time.monotonic() - begin
    return Finding(f"{counted(job.num_processes, 'process')} met at {job.coordinator} in {seconds:.1f} s", peers)


def devices(parallel: ParallelConfig, peers: Peers) -> Finding:
    """Find the devices of all processes. The value is the topology."""
    topology = Topology.create(parallel.devices, peers)
    memory = device_memory(topology)
    each = f", {size(memory)} of memory each" if memory else ""
    over = f" in {topology.process_count} processes" if topology.process_count > 1 else ""
    text = f"{topology.num_devices} x {topology.device_kind}{over}{each}"
    if topology.platform == "cpu":
        for number, noun, extra in ((len(local_gpus()), "GPU", "cuda12"), (len(local_chips()), "TPU chip", "tpu")):
            if number:
                unseen = f"JAX does not see the {counted(number, noun)} of this machine"
                advice = f"install jaxddp[{extra}], or set JAX_PLATFORMS=cpu"
                return Finding(f"{text}; {unseen}: {advice}", topology, "warn")
    return Finding(f"{text}; {tpu_slices(topology)}" if topology.platform == "tpu" else text, topology)


def tpu_slices(topology: Topology) -> str:
    """Describe the slices of a job on TPUs: "v4-32, 4 TPU chips on each of 4 hosts in 1 slice"."""
    all_devices = topology.mesh.devices.flat
    num_slices = len({getattr(device, "slice_index", 0) for device in all_devices})
    hosts = counted(len({device.process_index for device in all_devices}), "host")
    kind = accelerator_type() or "a TPU of unknown type"
    chips = counted(len(local_chips()), "TPU chip")
    return f"{kind}, {chips} on each of {hosts} in {counted(num_slices, 'slice')}"


def device_memory(topology: Topology) -> int | None:
    """Return the bytes that JAX may use on a device of this process; None if the backend does not report them."""
    stats = topology.mesh.local_devices[0].memory_stats() or {}
    return stats.get("bytes_limit")


def versions() -> Finding:
    """List the installed versions of the packages that a run needs."""
    installed = {"python": platform.python_version()}
    for package in (*PACKAGES, "libtpu") if local_chips() else PACKAGES:
        names = ("tensorflow", "tensorflow-cpu") if package == "tensorflow" else (package,)
        absent = "(a checkout)" if package == "jaxddp" else "not installed"
        installed[package] = next(filter(None, map(installed_version, names)), absent)
    detail = ", ".join(f"{name} {number}" for name, number in installed.items())
    if installed["tensorflow"] == "not installed":
        return Finding(f"{detail}: without TensorFlow only arrays in memory can be trained on", verdict="warn")
    return Finding(detail)


def all_reduce(topology: Topology) -> Finding:
    """Sum over all devices, check the sums, and measure the bandwidth of a link of the ring."""
    speeds, sums = [], []
    for name, num_bytes in _SIZES.items():
        if topology.platform == "cpu" and num_bytes > _LARGEST_ON_CPU:
            continue
        seconds, total = time_all_reduce(topology, num_bytes)
        sums.append(total)
        speed = bus_bandwidth(topology.num_devices, num_bytes, seconds) / 1e9
        speeds.append(f"{name} in {seconds * 1000:.3g} ms, {speed:.3g} GB/s")
    for total in sums:
        check_sum(topology, total)
    if topology.num_devices == 1:
        speeds = ["one device, so nothing is sent"]
    return Finding("; ".join(["sums are right", *speeds]))


def settings(file: RecipeFile | None, directory: Path | None, peers: Peers) -> Finding:
    """Check that all processes have the same arguments, which the later collective checks require."""
    values = {} if file is None else {key: str(value) for key, value in flatten(file.config.to_dict()).items()}
    values |= {"the recipe file's digest": str(file.digest()) if file else ""}
    arguments = {"CONFIG": file, "--workdir": directory}
    peers.agree({name: "not given" if value is None else "given" for name, value in arguments.items()} | values)
    return Finding("the same in all processes", True)


def work_directory(directory: Path, needed: int | None) -> Finding:
    """Create a directory, write into it, and check that `needed` bytes are free. The value is the directory."""
    files.create(directory)
    with files.readable_errors(directory), tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"\0" * 4096)
        file.flush()
        os.fsync(file.fileno())
    free = shutil.disk_usage(directory).free
    if needed is not None and needed > free:
        raise InputError(
            f"{directory}: {size(free)} free, and checkpoints will take up to {size(needed)}",
            advice=("free some space there, or lower ", Key("checkpoint.keep")),
        )
    checkpoints = "" if needed is None else f", checkpoints up to {size(needed)}"
    return Finding(f"{directory}: writable, {size(free)} free{checkpoints}", directory)


def slow_processes(directory: Path) -> Finding:
    """Report the slow processes in the last measurement of the run in a directory. The others wait for them."""
    path = directory / FILE
    with files.reading(path, "another run there writes it anew"):
        measured = StepSeconds.loads(path, files.read(path))
    slow, steps = measured.slow(), f"steps {measured.first + 1:,} to {measured.last:,} of the run there"
    if not slow:
        return Finding(f"{counted(len(measured.seconds), 'process')}, none makes the others wait ({steps})")
    more = f", and {len(slow) - 1} more" if len(slow) > 1 else ""
    return Finding(f"{slow[0]}{more} ({steps}); the table is in the run's log", verdict="warn")


def shared(directory: Path, peers: Peers) -> Finding:
    """Check that every process sees the files that process 0 writes."""
    check_shared(directory, peers)
    return Finding(f"{directory}: seen by all processes")
