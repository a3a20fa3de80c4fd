"""Starts the processes of a job on this machine, and waits until they end.

The launcher starts no JAX backend, because a backend allocates memory on every GPU.
"""

import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from jaxddp.cluster.machine import divide, local_gpus
from jaxddp.cluster.network import LauncherClient, LauncherServer
from jaxddp.cluster.options import Launch
from jaxddp.cluster.states import Agent, Assignment, Coordinator
from jaxddp.cluster.worker import OWN_PROGRAM, PREEMPTED, Worker, WorkerGroup, catch_signals, shared_environment
from jaxddp.config import Config
from jaxddp.core import tpu
from jaxddp.core.cores import local_cores
from jaxddp.core.errors import InputError, about, counted, nearest
from jaxddp.core.log import say
from jaxddp.core.ranges import Range, whole
from jaxddp.job.connection import raise_file_limit
from jaxddp.job.environment import INHERITED_SOCKET, KEY, RUN_ID, Job
from jaxddp.job.messages import LOOPBACK, is_loopback, listen, split_address

GENERATION = "JAXDDP_GENERATION"
"""The environment variable with the number, from 0, of the generation, which is one start of the whole job."""
_COMMANDS = ("train", "eval", "find-lr", "predict", "features", "doctor", "data")
"""A command that begins with one of these words is run by `python -m jaxddp`."""
_SIMULATED = Range(1, 100_000)


def launch(options: Launch, command: Sequence[str], config: Config | None = None) -> int:
    """Run a command in every process of this machine, and wait until all end. Call it in the main thread.

    Each process is a direct child in its own session. Its environment has JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES,
    JAX_PROCESS_ID, JAXDDP_RUN_ID and JAXDDP_GENERATION. If the job has one machine, it also has JAXDDP_JOB_KEY;
    if GPUs are divided, also CUDA_VISIBLE_DEVICES. Process 0 of the job also inherits a socket that listens at the
    coordinator's address; JAXDDP_COORDINATOR_FD holds its file descriptor. JAXDDP_STATUS_FD holds the file descriptor
    of a pipe; see `jaxddp.job.environment`. The output of process R is written to `process-R.log`, and shown line by
    line with the prefix `[R] `.

    Args:
        command: the arguments of `jaxddp` (`train digits`), or any program; `python` is this interpreter.
        config: the config that the command trains or evaluates, if any. It determines among how many machines a batch
            can be divided.

    Returns:
        The exit code of the job; see `jaxddp.cluster.worker.WorkerGroup.end`. After restarts, this is the exit
        code of the last start. After Ctrl-C here it is 130 if no process failed.

    Raises:
        InputError: the options contradict each other or exceed this machine's resources, or the command does not exist.
        Unreachable: the other machines do not connect in time.
    """
    program = _program(command)
    options.check()
    gpus, cores = _resources(options)
    counts = valid_machine_counts(config, options, len(gpus), len(gpus[0]))
    logs = options.logs or _default_logs(command)
    # Each machine has a connection. Each process has two pipes and a log file.
    raise_file_limit(options.machines.most + 3 * len(gpus))
    environ, group = shared_environment(), None
    if options.machines.most == 1:
        # On several machines, all launchers need the same key, so the user sets it.
        environ[KEY] = environ.get(KEY) or secrets.token_hex(32)

    def start(group: WorkerGroup, assignment: Assignment, listener: socket.socket | None) -> None:
        """Start the processes of this machine. Process 0 of the job inherits the listener."""
        total, machines = counted(assignment.processes, "process"), assignment.processes // len(gpus)
        over = f" on {machines} machines" if machines > 1 else ""
        say(f"jaxddp launch: {total}{over}, coordinator {assignment.coordinator}, output in {logs}")
        shared = environ | {"JAX_COORDINATOR_ADDRESS": assignment.coordinator, RUN_ID: assignment.run_id}
        shared |= {"JAX_NUM_PROCESSES": str(assignment.processes), GENERATION: str(assignment.generation)}
        if options.gpus == 0:
            shared |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        for rank, own_gpus, own_cores in zip(count(assignment.first_rank), gpus, cores, strict=False):
            own = shared | {"JAX_PROCESS_ID": str(rank)}
            if own_gpus:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus)
            passed = {INHERITED_SOCKET: listener.fileno()} if listener and rank == 0 else {}
            log = logs / f"process-{rank}.log"
            group.workers.append(Worker(rank, program, own, log, cores=own_cores, passed=passed))

    with catch_signals() as events, driver(options, len(gpus), counts, events) as meeting:
        while (assignment := meeting.next_start()) is not None:
            with closing(WorkerGroup(options.grace, options.save_grace, assignment.generation)) as group:
                # This process closes its copy of the socket, so that connections fail after process 0 ended.
                with meeting.listener or nullcontext() as listener:
                    start(group, assignment, listener)
                meeting.run(group)
    if group is not None:
        group.report()
        if meeting.code in (0, PREEMPTED) and group.received_signal == signal.SIGINT:
            return 128 + signal.SIGINT
    return meeting.code


def _program(command: Sequence[str]) -> list[str]:
    """Return the program and its arguments. `python` means this interpreter.

    Raises: InputError if the program does not exist.
    """
    word = command[0]
    if word in _COMMANDS:
        return [*OWN_PROGRAM, *command]
    if word in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if shutil.which(word) is None:
        raise InputError(f"launch: {word!r} is neither a command of jaxddp nor a program{nearest(word, _COMMANDS)}")
    return list(command)


def _default_logs(command: Sequence[str]) -> Path:
    """Return `logs` in the work directory that a command names, otherwise `runs/launch`."""
    workdir = re.search(r"\0--workdir[\0=]([^\0]+)", "\0".join(command))
    return Path(workdir[1]) / "logs" if workdir else Path("runs/launch")


def _resources(options: Launch) -> tuple[list[Sequence[str]], list[Sequence[int]]]:
    """Return the GPUs and the cores of each process. An empty sequence of cores means all cores.

    On a machine with TPU chips, one process uses all of them.
    """
    gpus, processes = list[str](), 1
    if chips := [] if options.gpus == 0 else tpu.local_chips():
        check_tpu_options(options, chips)
    else:
        visible = local_gpus()
        gpus = visible[: options.gpus]
        if options.gpus is not None and options.gpus > len(visible):
            there = f"this machine has {counted(len(visible), 'visible GPU')}"
            raise InputError(f"--gpus {options.gpus}: {there}; without GPUs, use --processes P")
        processes = len(gpus) if options.processes is None else options.processes
        if processes == 0:
            raise InputError("launch: no GPUs are used; set the number of processes with --processes P")
        if len(gpus) % processes:
            problem = f"{counted(len(gpus), 'GPU')} cannot be divided evenly among {counted(processes, 'process')}"
            advice = "use fewer GPUs with --gpus, or only the CPU with --gpus 0"
            raise InputError(f"--processes {processes}: {problem}", advice=advice)
    cores, needed = local_cores(), (options.cores or 0) * processes
    if needed > len(cores):
        problem = f"{counted(processes, 'process')} would need {counted(needed, 'core')}"
        raise InputError(f"--cores {options.cores}: {problem}, but the launcher may use only {len(cores)}")
    if is_oversubscribed := not needed and processes > len(cores):
        say(f"jaxddp launch: oversubscribed: {counted(processes, 'process')} on {counted(len(cores), 'core')}")
    is_free = options.cores == 0 or (options.cores is None and bool(gpus or chips)) or is_oversubscribed
    if is_free or not hasattr(os, "sched_setaffinity"):
        return divide(gpus, processes), [()] * processes
    return divide(gpus, processes), divide(cores[: needed or None], processes)


def check_tpu_options(options: Launch, chips: Sequence[Path]) -> None:
    """Raise InputError if the options divide the chips of this machine, which one process uses.

    Each process checks later that the job has the numbers of libtpu.
    """
    machine = f"this machine has {counted(len(chips), 'TPU chip')}, which one process uses"
    for name, value, fits in (("--gpus", options.gpus, (None, 0)), ("--processes", options.processes, (None, 1))):
        if value not in fits:
            advice = f"leave out {name}, or compute only on the CPU with --gpus 0 --processes P"
            raise InputError(f"{name} {value}: {machine}", advice=advice)


def valid_machine_counts(config: Config | None, options: Launch, processes: int, gpus: int) -> list[int]:
    """Return the numbers of machines, in ascending order, among which the batches of a config can be divided evenly.

    Print a line about the excluded numbers. Without a config, return all numbers.

    Args:
        processes: the number of processes on each machine.
        gpus: the number of GPUs of each process; 0 if it computes on the CPU.

    Raises: InputError if the batches cannot be divided among any number of machines.
    """
    counts = range(options.machines.least, options.machines.most + 1)
    if config is None or not options.machines.elastic:
        return [*counts]
    devices = config.parallel.cpu_devices or gpus or whole(os.environ.get("JAX_NUM_CPU_DEVICES", ""), _SIMULATED) or 1
    excluded = {size: problem for size in counts if (problem := sharing_problem(config, size * processes, devices))}
    if len(excluded) == len(counts):
        problem = f"{excluded[counts[0]]}, and no other number of machines is possible"
        raise InputError(f"--nodes {options.nodes}: {problem}")
    if excluded:
        problem = f"the job cannot run on {', '.join(map(str, excluded))} machines: {next(iter(excluded.values()))}"
        say(f"jaxddp launch: {problem}; surplus machines wait as spares")
    return [size for size in counts if size not in excluded]


def sharing_problem(config: Config, processes: int, devices: int) -> str | None:
    """Return why a config's batches cannot be divided among so many processes and devices; None if they can."""
    # This import imports NumPy, and the one below JAX, so they are local.
    from jaxddp.data.batch import Division

    used, groups = config.parallel.devices or processes * devices, config.parallel.groups or 1
    if used > processes * devices or used % processes:
        each = f"{processes} processes with {counted(devices, 'device')} each"
        return f"parallel.devices={used} cannot be divided among {each}"
    if used % groups:
        return f"parallel.groups={groups} does not divide {counted(used, 'device')}"
    shares = used
    if config.parallel.reproducible:
        from jaxddp.engine.ways.reproducible import SHARDS

        if SHARDS % used:
            return f"parallel.reproducible takes 1, 2, 4 or {SHARDS} devices, not {used}"
        shares = SHARDS
    division = Division.of(config, shares)
    if config.parallel.division is not None:
        try:
            config.parallel.division.lengths(division.batch_size, used, processes, division.unit_of_slice)
        except InputError as error:
            return str(error)
    elif not division.is_even:
        each = f", accumulate={division.accumulate}" if division.accumulate > 1 else ""
        return f"train.batch_size={division.batch_size} cannot be divided among {used} devices{each}"
    if config.eval.batch_size % used:
        return f"eval.batch_size={config.eval.batch_size} cannot be divided among {used} devices"
    return None


def driver(options: Launch, processes: int, counts: Sequence[int], events: SimpleQueue[Any]) -> Coordinator | Agent:
    """Return the part of this machine's launcher in the job, with connections if the launchers must meet.

    Args:
        processes: the number of processes on each machine.
        counts: the numbers of machines that the job may have.

    Raises: InputError if the coordinator's address is invalid, or its port is taken.
    """
    # All machines of the job must compute the same name.
    shared = hashlib.sha256(str(options.coordinator).encode()).hexdigest()[:16]
    name = options.run_id or (shared if options.machines.most > 1 else secrets.token_hex(8))
    counts = counts if options.launchers_meet else [1]
    start = partial(Coordinator, options=options, events=events, processes=processes, counts=counts)
    if not options.launchers_meet:
        return start(network=None, name=name, listen=lambda: None if options.nr else _listen_at(options))
    assert options.coordinator is not None and options.nr is not None
    # The run id of the launchers' own job differs from the run id of the workers.
    ids, key = f"{name}/launchers", os.environ.get(KEY, "")
    job = Job(options.coordinator, options.machines.most, options.nr, run_id=ids, key=key)
    facts = {"--nodes": options.nodes, "the number of processes (--processes or --gpus)": str(processes)}
    if options.nr:
        client = LauncherClient(job, facts, events.put)
        return Agent(options=options, events=events, network=client, reach=client.reach)
    listener = _listen_at(options)
    host = listener.getsockname()[0]
    # A launcher that the user starts again numbers its generations from 0 again. A random suffix makes the run ids
    # unique.
    unique, network = f"{name}.{secrets.token_hex(4)}", LauncherServer(listener, job, facts, events.put)
    return start(network=network, name=unique, listen=lambda: listen(host, 0))


def _listen_at(options: Launch) -> socket.socket:
    """Listen at the coordinator's address, or at a free port of the loopback. Raises InputError if this fails."""
    host, port = split_address(options.coordinator) if options.coordinator else (LOOPBACK, 0)
    with about(f"--coordinator {options.coordinator or LOOPBACK}"):
        listener = listen(host, port)
    address = listener.getsockname()[0]
    if options.machines.most > 1 and is_loopback(address) and not is_loopback(host):
        # Debian's /etc/hosts maps a machine's own name to a loopback address.
        say(f"jaxddp launch: {host} resolves to {address} here, which no other machine can reach; give its IP address")
    return listener
