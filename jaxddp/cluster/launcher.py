"""Starts the processes of a job on this machine, and waits until they end.

The launcher starts no JAX backend, because a backend allocates memory on every GPU.
"""

import hashlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import count, zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from jaxddp.cluster.machine import divide, local_cores, local_gpus
from jaxddp.cluster.meeting.network import LauncherClient, LauncherServer
from jaxddp.cluster.meeting.states import Agent, Assignment, Coordinator
from jaxddp.cluster.options import Launch
from jaxddp.cluster.worker import Worker, WorkerGroup, catch_signals, shared_environment
from jaxddp.config import Config
from jaxddp.core.errors import InputError, JaxddpError, about, counted, nearest
from jaxddp.core.log import say
from jaxddp.core.ranges import Range, whole
from jaxddp.core.tpu import local_chips
from jaxddp.data.batch import Division
from jaxddp.job import tpu
from jaxddp.job.connection import raise_file_limit
from jaxddp.job.env_variables import Environ
from jaxddp.job.environment import INHERITED_SOCKET, KEY, RUN_ID, Job
from jaxddp.job.messages import LOOPBACK, MOST_PROCESSES, address_of, is_loopback, listen, split_address

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
        code of the last start.

    Raises:
        InputError: the options contradict each other or exceed this machine's resources, or the command does not exist.
        Unreachable: the other machines do not connect in time.
    """
    program = _program(command)
    options.check()
    gpus, cores = _resources(options)
    counts = valid_machine_counts(config, options, len(gpus), len(gpus[0]))
    logs = options.logs or _default_logs(command)
    if (total := options.machines.most * len(gpus)) > MOST_PROCESSES:
        each = f"--nodes {options.nodes} with {counted(len(gpus), 'process')} each"
        raise InputError(f"{each}: {total:,} processes; a job has at most {MOST_PROCESSES:,}")
    # Each machine has a connection. Each process has two pipes and a log file.
    raise_file_limit(options.machines.most + 3 * len(gpus))
    environ, group = shared_environment(), None
    if options.machines.most == 1:
        # On several machines, all launchers need the same key, so the user sets it.
        environ.setdefault(KEY, secrets.token_hex(32))

    def start(group: WorkerGroup, assignment: Assignment, listener: socket.socket | None) -> None:
        """Start the processes of this machine. Process 0 of the job inherits the listener."""
        total, machines = counted(assignment.processes, "process"), assignment.processes // len(gpus)
        over = f" on {machines} machines" if machines > 1 else ""
        say(f"jaxddp launch: {total}{over}, coordinator {assignment.coordinator}, output in {logs}")
        shared = {
            **environ,
            "JAX_COORDINATOR_ADDRESS": assignment.coordinator,
            "JAX_NUM_PROCESSES": str(assignment.processes),
            RUN_ID: assignment.run_id,
            GENERATION: str(assignment.generation),
        }
        if options.gpus == 0:
            shared |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        for rank, own_gpus, own_cores in zip(count(assignment.first_rank), gpus, cores, strict=False):
            fds = [listener.fileno()] if listener and rank == 0 else []
            own = shared | {"JAX_PROCESS_ID": str(rank)}
            if fds:
                own[INHERITED_SOCKET] = str(fds[0])
            if own_gpus:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus)
            log = logs / f"process-{rank}.log"
            group.workers.append(Worker.start(rank, program, own, log, cores=own_cores, pass_fds=fds))

    with catch_signals() as events:
        meeting, error = driver(options, len(gpus), counts, events), None
        try:
            while (local_start := meeting.next_start()) is not None:
                with closing(
                    WorkerGroup(options.grace, options.save_grace, local_start.assignment.generation)
                ) as group:
                    # This process closes its copy of the socket, so that connections fail after process 0 ended.
                    with local_start.listener or nullcontext() as listener:
                        start(group, local_start.assignment, listener)
                    meeting.run(group)
        except JaxddpError as raised:
            error = raised
            raise
        finally:
            meeting.close(error)
    if group is not None:
        group.report()
    return meeting.code


def _program(command: Sequence[str]) -> list[str]:
    """Return the program and its arguments. `python` means this interpreter.

    Raises:
        InputError: the program does not exist.
    """
    word = command[0]
    if word in _COMMANDS:
        return [sys.executable, "-m", "jaxddp", *command]
    if word in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if shutil.which(word) is None:
        raise InputError(f"launch: {word!r} is neither a command of jaxddp nor a program{nearest(word, _COMMANDS)}")
    return list(command)


def _default_logs(command: Sequence[str]) -> Path:
    """Return `logs` in the work directory that a command names, otherwise `runs/launch`."""
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        if word == "--workdir" and following:
            return Path(following) / "logs"
        if word.startswith("--workdir="):
            return Path(word.partition("=")[2]) / "logs"
    return Path("runs/launch")


def _resources(options: Launch) -> tuple[list[Sequence[str]], list[Sequence[int]]]:
    """Return the GPUs and the cores of each process. An empty sequence of cores means all cores.

    On a machine with TPU chips, one process uses all of them.
    """
    if options.gpus != 0 and (chips := local_chips()):
        check_tpu_options(options, chips)
        return [()], _cores(options, 1, pinned=False)
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
    return divide(gpus, processes), _cores(options, processes, pinned=not gpus)


def _cores(options: Launch, processes: int, *, pinned: bool) -> list[Sequence[int]]:
    cores, needed = local_cores(), (options.cores or 0) * processes
    if needed > len(cores):
        problem = f"{counted(processes, 'process')} would need {counted(needed, 'core')}"
        raise InputError(f"--cores {options.cores}: {problem}, but the launcher may use only {len(cores)}")
    if not needed and processes > len(cores):
        say(f"jaxddp launch: oversubscribed: {counted(processes, 'process')} on {counted(len(cores), 'core')}")
        pinned = False
    is_pinned = needed or (pinned and options.cores is None)
    if not is_pinned or not hasattr(os, "sched_setaffinity"):
        return [()] * processes
    return divide(cores[: needed or None], processes)


def check_tpu_options(options: Launch, chips: Sequence[Path], environ: Environ = os.environ) -> None:
    """Check that the launcher may start one process here, with all chips of this machine.

    Args:
        options: the launcher's options.
        chips: the device files of this machine's chips.
        environ: the environment, which may name the hosts of the slice.

    Raises:
        InputError: the options divide the chips, or differ from the hosts of the TPU slice.
        Unreachable: the metadata server of a TPU VM does not answer in time.
    """
    machine = f"this machine has {counted(len(chips), 'TPU chip')}, which one process uses"
    for name, value, fits in (("--gpus", options.gpus, (None, 0)), ("--processes", options.processes, (None, 1))):
        if value not in fits:
            advice = f"leave out {name}, or compute only on the CPU with --gpus 0 --processes P"
            raise InputError(f"{name} {value}: {machine}", advice=advice)
    process, hosts, _ = tpu.place(tpu.with_metadata(environ))
    if hosts is None:
        return
    machines = options.machines
    if (str(machines.least), str(machines.most)) != (hosts.value, hosts.value):
        others = f"give --nodes {hosts.value}, --nr and --coordinator" if hosts.value != "1" else "leave out --nodes"
        problem = f"the TPU slices of this job have {counted(int(hosts.value), 'host')} ({hosts.variable})"
        advice = f"start `jaxddp train` on every host without the launcher, or {others}"
        raise InputError(f"--nodes {options.nodes}: {problem}", advice=advice)
    if process is not None and options.nr is not None and process.value != str(options.nr):
        raise InputError(f"--nr {options.nr}: libtpu numbers this host {process.value}; give --nr {process.value}")


def valid_machine_counts(config: Config | None, options: Launch, processes: int, gpus: int) -> list[int]:
    """Return the numbers of machines, in ascending order, among which the batches of a config can be divided evenly.

    Print a line about the excluded numbers. Without a config, return all numbers.

    Args:
        processes: the number of processes on each machine.
        gpus: the number of GPUs of each process; 0 if it computes on the CPU.

    Raises:
        InputError: the batches cannot be divided among any number of machines.
    """
    counts = range(options.machines.least, options.machines.most + 1)
    if config is None or not options.machines.elastic:
        return [*counts]
    devices = config.parallel.cpu_devices or gpus or whole(os.environ.get("JAX_NUM_CPU_DEVICES", ""), _SIMULATED) or 1
    problems = {size: sharing_problem(config, size * processes, devices) for size in counts}
    excluded = {size: problem for size, problem in problems.items() if problem is not None}
    if len(excluded) == len(counts):
        problem = f"{excluded[counts[0]]}, and no other number of machines is possible"
        raise InputError(f"--nodes {options.nodes}: {problem}")
    if excluded:
        problem = f"the job cannot run on {', '.join(map(str, excluded))} machines: {next(iter(excluded.values()))}"
        say(f"jaxddp launch: {problem}; surplus machines wait as spares")
    return [size for size in counts if size not in excluded]


def sharing_problem(config: Config, processes: int, devices: int) -> str | None:
    """Return why a config's batches cannot be divided among so many processes and devices; None if they can."""
    total = processes * devices
    used = config.parallel.devices or total
    if used > total or used % processes:
        each = f"{processes} processes with {counted(devices, 'device')} each"
        return f"parallel.devices={used} cannot be divided among {each}"
    shares = used
    if config.parallel.reproducible:
        # This import imports JAX, so it is local.
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

    Raises:
        InputError: the coordinator's address is invalid, or its port is taken.
    """
    # All machines of the job must compute the same name.
    shared = hashlib.sha256(str(options.coordinator).encode()).hexdigest()[:16]
    name = options.run_id or (shared if options.machines.most > 1 else secrets.token_hex(8))
    if not options.launchers_meet:
        return Coordinator(options, events, None, processes, counts, name, lambda: _listen_alone(options))
    assert options.coordinator is not None and options.nr is not None
    # The run id of the launchers' own job differs from the run id of the workers.
    ids, key = f"{name}/launchers", os.environ.get(KEY, "")
    job = Job(options.coordinator, options.machines.most, options.nr, run_id=ids, sources=(KEY,), key=key)
    facts = {"--nodes": options.nodes, "the number of processes (--processes or --gpus)": str(processes)}
    if options.nr:
        return Agent(options, events, LauncherClient(job, facts, events.put))
    listener = _listen_at(options)
    host = listener.getsockname()[0]
    # A launcher that the user starts again numbers its generations from 0 again. A random suffix makes the run ids
    # unique.
    name, network = f"{name}.{secrets.token_hex(4)}", LauncherServer(listener, job, facts, events.put)
    return Coordinator(options, events, network, processes, counts, name, lambda: _with_address(listen(host, 0)))


def _listen_alone(options: Launch) -> tuple[socket.socket | None, str]:
    if options.nr:
        return None, options.coordinator or ""
    listener, address = _with_address(_listen_at(options))
    return listener, options.coordinator or address


def _with_address(listener: socket.socket) -> tuple[socket.socket, str]:
    return listener, address_of(listener)


def _listen_at(options: Launch) -> socket.socket:
    """Listen at the coordinator's address, or at a free port of the loopback. Raises InputError if this fails."""
    host, port = split_address(options.coordinator) if options.coordinator else (LOOPBACK, 0)
    with about(f"--coordinator {options.coordinator or LOOPBACK}"):
        listener = listen(host, port)
    if options.machines.most > 1 and is_loopback(listener.getsockname()[0]) and not is_loopback(host):
        # Debian's /etc/hosts maps a machine's own name to a loopback address.
        address = listener.getsockname()[0]
        say(f"jaxddp launch: {host} resolves to {address} here, which no other machine can reach; give its IP address")
    return listener
