"""Checks a machine, a job and a config before a run, and reports a row for each check.

The checks are independent: a failed check becomes a row of the report, and the other checks still run. In a job, every
process makes every check. At the end the processes exchange their rows, so each process reports the failures of all
processes. A collective check starts only if all processes are ready. Otherwise some processes would wait for the
others.

The checks of a recipe rehearse the start of a run: they open the data, decode images, and compile the step.
"""

import dataclasses
import functools
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

import jaxddp.core.files as files
from jaxddp.cluster.machine import local_gpus
from jaxddp.config import Config, ParallelConfig
from jaxddp.core import cores, libraries, phases, tpu, user_code
from jaxddp.core.errors import InputError, Key, counted, plural, size, speed
from jaxddp.core.peers import Peers, joined
from jaxddp.data.opening import labelled_and_unlabelled, open_tables
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.source import Source
from jaxddp.engine.state import shapes_of_one
from jaxddp.job.environment import Job, find_job
from jaxddp.measure.memory import Fit, MemoryReport, Needs
from jaxddp.mesh import AXIS, Topology
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup.resources import join_job
from jaxddp.setup.run_setup import RunSetup, initialize, open_recipe
from jaxddp.setup.run_training import claim_of
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, steps_in
from jaxddp.training.listeners.jsonl import FILE, StepSeconds
from jaxddp.training.progress import count_parameters
from jaxddp.workdir.claim import compare
from jaxddp.workdir.session import check_shared

Verdict = Literal["ok", "warn", "fail"]
PACKAGES = ("jaxddp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_SIZES = {"4 kB": 4_000, "1 MB": 1_000_000, "16 MB": 16_000_000, "100 MB": 100_000_000}


class Finding(NamedTuple):
    """The result of a check: a line for the user, and a value for later checks."""

    detail: str
    value: Any = None
    verdict: Verdict = "ok"


def environment() -> Finding:
    """Find the job of this process. The value is None for a single process."""
    job, machine = find_job(), f"{platform.node()}, {counted(cores.num_cores(), 'core')}"
    if job is not None:
        return Finding(f"{machine}: {job}", job)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_STEP_ID" not in os.environ:
        advice = f"SLURM has {tasks} tasks for this job; start them with srun"
        return Finding(f"{machine}: a single process; {advice}", verdict="warn")
    return Finding(f"{machine}: a single process (no launcher's variables)")


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
    memory = (topology.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    each = f", {size(memory)} of memory each" if memory else ""
    over = f" in {topology.peers.process_count} processes" if topology.peers.process_count > 1 else ""
    text = f"{topology.num_devices} x {topology.device_kind}{over}{each}"
    if topology.platform == "cpu":
        for number, noun, extra in ((len(local_gpus()), "GPU", "cuda12"), (len(tpu.local_chips()), "TPU chip", "tpu")):
            if number:
                unseen = f"JAX does not see the {counted(number, noun)} of this machine"
                advice = f"install jaxddp[{extra}], or set JAX_PLATFORMS=cpu"
                return Finding(f"{text}; {unseen}: {advice}", topology, "warn")
    return Finding(f"{text}; {tpu_slices(topology)}" if topology.platform == "tpu" else text, topology)


def tpu_slices(topology: Topology) -> str:
    """Describe the slices of a job on TPUs: "4 TPU chips on each of 4 hosts in 1 slice"."""
    num_slices = len({getattr(device, "slice_index", 0) for device in topology.mesh.devices.flat})
    hosts = counted(topology.peers.process_count, "host")
    return f"{counted(len(tpu.local_chips()), 'TPU chip')} on each of {hosts} in {counted(num_slices, 'slice')}"


def versions() -> Finding:
    """List the installed versions of the packages that a run needs."""
    packages = PACKAGES + ("libtpu",) * bool(tpu.local_chips())
    found = {"python": platform.python_version()}
    found |= {package: libraries.installed_version(package) for package in packages}
    found["jaxddp"] = found["jaxddp"] or "(a checkout)"
    return Finding(", ".join(f"{name} {version or 'not installed'}" for name, version in found.items()))


def all_reduce(topology: Topology) -> Finding:
    """Sum over all devices, check the sums, and measure the bandwidth of a link of the ring."""
    largest = 16_000_000 if topology.platform == "cpu" else math.inf
    sizes = {name: num_bytes for name, num_bytes in _SIZES.items() if num_bytes <= largest}
    measured = {name: time_all_reduce(topology, num_bytes) for name, num_bytes in sizes.items()}
    speeds = ["sums are right"]
    for name, (seconds, total) in measured.items():
        check_sum(topology, total)
        bandwidth = bus_bandwidth(topology.num_devices, sizes[name], seconds) / 1e9
        speeds.append(f"{name} in {seconds * 1000:.3g} ms, {bandwidth:.3g} GB/s")
    if topology.num_devices == 1:
        return Finding("sums are right; one device, so nothing is sent")
    return Finding("; ".join(speeds))


def settings(file: RecipeFile | None, directory: Path | None, peers: Peers) -> Finding:
    """Check that all processes have the same arguments, which the later collective checks require."""
    values = {} if file is None else {key: str(value) for key, value in file.config.flat().items()}
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
        problem = f"{directory}: {size(free)} free, and checkpoints will take up to {size(needed)}"
        raise InputError(problem, advice=("free some space there, or lower ", Key("checkpoint.keep")))
    checkpoints = "" if needed is None else f", checkpoints up to {size(needed)}"
    return Finding(f"{directory}: writable, {size(free)} free{checkpoints}", directory)


def slow_processes(directory: Path) -> Finding:
    """Report the slow processes in the last measurement of the run in a directory. The others wait for them."""
    path = directory / FILE
    measured = StepSeconds.loads(path, files.content_of(path, "another run there writes it anew"))
    slow, steps = measured.slow(), f"steps {measured.first + 1:,} to {measured.last:,} of the run there"
    if not slow:
        return Finding(f"{counted(len(measured.seconds), 'process')}, none makes the others wait ({steps})")
    more = f", and {len(slow) - 1} more" if len(slow) > 1 else ""
    return Finding(f"{slow[0]}{more} ({steps}); the table is in the run's log", verdict="warn")


def shared(directory: Path, peers: Peers) -> Finding:
    """Check that every process sees the files that process 0 writes."""
    check_shared(directory, peers)
    return Finding(f"{directory}: seen by all processes")


REPEATS = 9
_CYCLE = 5


def make_all_reduce(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    """Return a function that sums over all devices: float32[devices * n], sharded, to float32[n], replicated."""
    reduce = jax.shard_map(lambda part: lax.psum(part, AXIS), mesh=topology.mesh, in_specs=P(AXIS), out_specs=P())
    return jax.jit(reduce)


def contributions(topology: Topology, size: int) -> jax.Array:
    """Return float32[devices * size]. Element j on device i is (i + j) mod 5, so sums are exact in any order."""

    def part() -> jax.Array:
        return (lax.axis_index(AXIS) + jnp.arange(size)).astype(jnp.float32) % _CYCLE

    return jax.jit(jax.shard_map(part, mesh=topology.mesh, in_specs=(), out_specs=P(AXIS)))()


def check_sum(topology: Topology, total: jax.Array) -> None:
    """Compare the sum of `contributions` on each device of this process with the expected sum.

    Raises: InputError if a sum is wrong.
    """
    cycle = [sum((i + j) % _CYCLE for i in range(topology.num_devices)) for j in range(_CYCLE)]
    expected = np.resize(np.array(cycle, np.float32), total.shape)
    for shard in total.addressable_shards:
        actual = np.asarray(shard.data)
        if (wrong := np.flatnonzero(actual != expected)).size:
            at = wrong[0]
            what = f"a sum of {total.nbytes} bytes over {topology.num_devices} devices is wrong"
            element = f"element {at} is {actual[at]:g}, expected {expected[at]:g}"
            raise InputError(f"{shard.device}: {what}: {element}", advice="do not train here before this is fixed")


def time_all_reduce(topology: Topology, num_bytes: int, repeats: int = REPEATS) -> tuple[float, jax.Array]:
    """Return the median seconds of an all-reduce of `num_bytes` on each device, and the last sum, for `check_sum`.

    All processes must call this function with the same arguments. It does not check the sum: if one process raised an
    error between the all-reduces, the others would wait for it.
    """
    reduce, parts = make_all_reduce(topology), contributions(topology, num_bytes // 4)
    total, seconds = jax.block_until_ready(reduce(parts)), []
    for _ in range(repeats):
        begin = time.perf_counter()
        total = jax.block_until_ready(reduce(parts))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), total


def bus_bandwidth(num_devices: int, num_bytes: int, seconds: float) -> float:
    """Return the bytes per second over each link of a ring. A link carries 2 (n - 1) / n times the buffer.

    See Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. nccl-tests calls it busbw.
    """
    return 2 * (num_devices - 1) / num_devices * num_bytes / seconds


SAMPLE_IMAGES = 512
_SAMPLE_BATCH = 16


def data(config: Config, process: int = 0) -> Finding:
    """Open the data, and check that every image exists. The value is the training and validation tables."""
    train_table, val_table = open_tables(config.data.of_process(process), config.eval.limit)
    train_table, unlabelled = labelled_and_unlabelled(train_table, config.data)
    more = "" if unlabelled is None else f", {len(unlabelled):,} without labels"
    counts = f"{counted(len(train_table), 'row')} to train, {len(val_table):,} to validate{more}"
    detail = f"{counts}, {counted(train_table.num_classes, 'class')}; every image is there"
    return Finding(detail, (train_table, val_table))


def images(config: Config, tables: tuple[Source, Source], process: int) -> Finding:
    """Decode the first training images, with different images in each process, and the first validation images."""
    train_source, val_source = tables
    size = min(_SAMPLE_BATCH, len(train_source))
    steps = -(-min(SAMPLE_IMAGES, len(train_source)) // size)
    order = SampleOrder(len(train_source), size, config.seed)
    step_numbers = range(process * steps, (process + 1) * steps)
    substitutes = train_source.substitutes(config.data)
    batches = train_source.train_batches(order, config.data, step_numbers, substitutes=substitutes)
    # The first batch is not timed, because it includes the start of reading and decoding.
    decoded, begin = len(next(batches).row), time.perf_counter()
    timed = sum(len(batch.row) for batch in batches)
    pace = f" at {speed(timed / (time.perf_counter() - begin))} images/s" if timed else ""
    evaluation = val_source.eval_batches(EvalOrder(len(val_source), _SAMPLE_BATCH), config.data.of_evaluation)
    validated = int(sum(batch.mask.sum() for batch in islice(evaluation, steps)))
    return Finding(f"{decoded + timed} read for training{pace}, {validated} for validation")


def recipe(file: RecipeFile, directory: Path | None) -> Finding:
    """Set up the run as training does, and compare it with a run to resume. The value is the setup."""
    opened = open_recipe(file)
    if directory is not None and steps_in(directory / CHECKPOINTS):
        compare(directory, claim_of(opened, directory), opened.topology.peers)
    setup = initialize(opened)
    steps = f"{counted(setup.layout.plan.total_steps, 'step')} of {counted(setup.feed.order.batch_size, 'image')}"
    count = count_parameters(setup.state.params)
    name = "the recipe's own network" if "get_model" in file.hooks else file.config.model.name
    placed = dataclasses.replace(setup, state=setup.way.placed(setup.state))
    return Finding(f"{name}, {count:,} parameters; {steps}", placed)


def step(setup: RunSetup) -> Finding:
    """Compile the training step. Report its FLOPs and memory, including the images that stay on the devices.

    Raises: InputError if the step does not fit into the memory of the devices of this process.
    """
    program = setup.compiled_steps(resident=False)
    begin = time.perf_counter()
    feed, division = (setup.feed.abstract_batch(), setup.key), setup.layout.division
    program.prepare(setup.state, *feed)
    work = f"{program.cost.flops / 1e9:.3g} GFLOP a step; compiled in {time.perf_counter() - begin:.0f} s"
    kept = setup.feed.resident_bytes(setup.validated) if setup.config.data.cache == "device" else {}
    needs = Needs.of(program.cost, shapes_of_one(setup.state).params, setup.topology, kept)
    fit = Fit.of(division, [MemoryReport.of(needs, setup.topology, setup.state)])
    fit.check()
    return Finding(f"{work}; {fit}")


class CheckRow(NamedTuple):
    """One line of the report."""

    check: str
    verdict: Verdict
    detail: str


def add(rows: list[CheckRow], check: str, run: Callable[..., Finding], *arguments: Any) -> Any | None:
    """Run a check, add its row, and return the value of its finding; None if the check failed."""
    try:
        with phases.doing(f"checking {check}"):
            finding = run(*arguments)
    except Exception as error:
        finding = Finding(user_code.describe_error(error), verdict="fail")
    rows.append(CheckRow(check, finding.verdict, finding.detail))
    return finding.value


def doctor(file: RecipeFile | None, workdir: Path | None) -> list[CheckRow]:
    """Check this machine, and return the rows of the report.

    In a job, all processes must call this function. It returns the same rows in all processes.

    Args:
        file: a recipe, whose data, training step and checkpoint size are also checked.
        workdir: a work directory, which is also checked.
    """
    rows = list[CheckRow]()
    report = functools.partial(add, rows)
    parallel = file.config.parallel if file else ParallelConfig()
    job = report("environment", environment)
    peers = report("coordinator", coordinator, job, parallel, rows[0].verdict != "fail") or joined()

    def all_are_ready(*needed: object) -> bool:
        """Return whether every process has what a collective check needs. The exchange uses no devices."""
        return all(peers.exchange("doctor: ready", None not in needed))

    topology = report("devices", devices, parallel, peers)
    report("versions", versions)
    if all_are_ready(topology):
        report("all-reduce", all_reduce, topology)
    # In the checks below, processes with different arguments would wait for each other.
    if peers.is_alone or report("settings", settings, file, workdir, peers):
        setup, needed, process = None, None, job.process_id if job else 0
        if file is not None:
            tables = report("data", data, file.config, process)
            if tables is not None:
                report("images", images, file.config, tables, process)
            if all_are_ready(topology, tables):
                setup = report("recipe", recipe, file, workdir)
            if setup is not None:
                report("step", step, setup)
                # The last `keep` checkpoints, the best, and the one being written.
                needed = (file.config.checkpoint.keep + 2) * sum(leaf.nbytes for leaf in jax.tree.leaves(setup.state))
        if workdir is not None:
            written = report("work directory", work_directory, workdir, needed)
            if written is not None and (written / FILE).exists():
                report("processes", slow_processes, workdir)
            if not peers.is_alone and all_are_ready(written):
                report("shared", shared, workdir, peers)
    return merge([[CheckRow(*row) for row in each] for each in peers.exchange("doctor: rows", rows)])


def merge(reports: Sequence[Sequence[CheckRow]]) -> list[CheckRow]:
    """Return the rows of process 0. The other processes' warnings and failures follow the rows of the same check."""
    merged = []
    for name in dict.fromkeys(row.check for rows in reports for row in rows):
        first_rows, *other_rows = ([row for row in rows if row.check == name] for rows in reports)
        merged += first_rows
        processes_by_row = defaultdict[CheckRow, list[str]](list)
        for process, rows in enumerate(other_rows, start=1):
            for row in rows:
                if row.verdict != "ok" and row not in first_rows:
                    processes_by_row[row].append(str(process))
        for row, ids in processes_by_row.items():
            merged.append(row._replace(detail=f"{plural(len(ids), 'process')} {', '.join(ids)}: {row.detail}"))
    return merged
