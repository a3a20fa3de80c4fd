"""Starts the processes of a job on this machine, and waits until they end.

The launcher starts no JAX backend, because a backend allocates memory on every GPU.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path

from jaxddp.cluster.elastic_sizes import valid_machine_counts
from jaxddp.cluster.event_queue import catch_signals
from jaxddp.cluster.machine import divide, local_cores, local_gpus
from jaxddp.cluster.meeting.driver import LocalStart, driver
from jaxddp.cluster.options import Launch
from jaxddp.cluster.process_output import say
from jaxddp.cluster.tpu_host import check_options
from jaxddp.cluster.worker import Worker, shared_environment
from jaxddp.cluster.worker_group import WorkerGroup
from jaxddp.config import Config
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.tpu import local_chips
from jaxddp.core.wording import counted, nearest
from jaxddp.job.environment import INHERITED_SOCKET, KEY, RUN_ID
from jaxddp.wire.connection import raise_file_limit
from jaxddp.wire.messages import MOST_PROCESSES

GENERATION = "JAXDDP_GENERATION"
"""The environment variable with the number, from 0, of the generation, which is one start of the whole job."""
_COMMANDS = ("train", "eval", "find-lr", "predict", "features", "doctor", "data")
"""A command that begins with one of these words is run by `python -m jaxddp`."""


@dataclass(frozen=True)
class _Settings:
    """The settings that all generations share.

    Attributes:
        gpus: the GPUs of each process, in the notation of CUDA_VISIBLE_DEVICES.
        cores: the cores of each process; an empty sequence means all cores.
    """

    options: Launch
    program: Sequence[str]
    logs: Path
    gpus: Sequence[Sequence[str]]
    cores: Sequence[Sequence[int]]
    environ: Mapping[str, str]


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
        The exit code of the job; see `jaxddp.cluster.worker_group.WorkerGroup.watch`. After restarts, this is the exit
        code of the last start.

    Raises:
        InputError: the options contradict each other or exceed this machine's resources, or the command does not exist.
        Unreachable: the other machines do not connect in time.
    """
    program = _program(command)
    options.check()
    gpus, cores = _resources(options)
    sizes = valid_machine_counts(config, options, len(gpus), len(gpus[0]))
    logs = options.logs or _default_logs(command)
    if (total := options.machines.most * len(gpus)) > MOST_PROCESSES:
        each = f"--nodes {options.nodes} with {counted(len(gpus), 'process')} each"
        raise InputError(f"{each}: {total:,} processes; a job has at most {MOST_PROCESSES:,}")
    # Each machine has a connection. Each process has two pipes and a log file.
    raise_file_limit(options.machines.most + 3 * len(gpus))
    settings, group = _Settings(options, program, logs, gpus, cores, _job_environment(options)), None
    with catch_signals() as events:
        meeting, error = driver(options, len(gpus), sizes, events), None
        try:
            while (local_start := meeting.next_start()) is not None:
                with closing(WorkerGroup(options.grace, options.save_grace)) as group:
                    _start(group, local_start, settings)
                    meeting.record_end(group.watch(events, meeting))
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


def _start(group: WorkerGroup, local_start: LocalStart, settings: _Settings) -> None:
    """Start the processes of this machine."""
    assignment, each = local_start.assignment, len(settings.gpus)
    # Process 0 inherits the socket. This process closes its copy, so that connections fail after process 0 ended.
    with local_start.listener or nullcontext() as listener:
        total, machines = counted(assignment.processes, "process"), assignment.processes // each
        over = f" on {machines} machines" if machines > 1 else ""
        say(f"jaxddp launch: {total}{over}, coordinator {assignment.coordinator}, output in {settings.logs}")
        shared = {
            **settings.environ,
            "JAX_COORDINATOR_ADDRESS": assignment.coordinator,
            "JAX_NUM_PROCESSES": str(assignment.processes),
            RUN_ID: assignment.run_id,
            GENERATION: str(assignment.generation),
        }
        for rank, gpus, cores in zip(count(assignment.first_rank), settings.gpus, settings.cores, strict=False):
            fds = [listener.fileno()] if listener and rank == 0 else []
            environ = shared | _process_environment(settings.options, rank, gpus, fds)
            log = settings.logs / f"process-{rank}.log"
            group.workers.append(Worker.start(rank, settings.program, environ, log, cores=cores, pass_fds=fds))


def _resources(options: Launch) -> tuple[list[Sequence[str]], list[Sequence[int]]]:
    """Return the GPUs and the cores of each process. An empty sequence of cores means all cores.

    On a machine with TPU chips, one process uses all of them.
    """
    if options.gpus != 0 and (chips := local_chips()):
        check_options(options, chips)
        return [()], _cores(options, 1, pinned=False)
    visible = local_gpus()
    gpus = visible if options.gpus is None else visible[: options.gpus]
    if options.gpus is not None and options.gpus > len(visible):
        raise InputError(
            f"--gpus {options.gpus}: this machine has {counted(len(visible), 'visible GPU')}; without GPUs, "
            "use --processes P"
        )
    processes = len(gpus) if options.processes is None else options.processes
    if processes == 0:
        raise InputError("launch: no GPUs are used; set the number of processes with --processes P")
    if len(gpus) % processes:
        raise InputError(
            f"--processes {processes}: {counted(len(gpus), 'GPU')} cannot be divided evenly among "
            f"{counted(processes, 'process')}; use fewer GPUs with --gpus, or only the CPU with --gpus 0"
        )
    return divide(gpus, processes), _cores(options, processes, pinned=not gpus)


def _cores(options: Launch, processes: int, *, pinned: bool) -> list[Sequence[int]]:
    cores = local_cores()
    if options.cores:
        if options.cores * processes > len(cores):
            needed = f"{counted(processes, 'process')} would need {counted(options.cores * processes, 'core')}"
            raise InputError(f"--cores {options.cores}: {needed}, but the launcher may use only {len(cores)}")
        cores = cores[: options.cores * processes]
    elif processes > len(cores):
        say(f"jaxddp launch: oversubscribed: {counted(processes, 'process')} on {counted(len(cores), 'core')}")
        pinned = False
    if options.cores == 0 or not (options.cores or pinned) or not hasattr(os, "sched_setaffinity"):
        return [()] * processes
    return divide(cores, processes)


def _job_environment(options: Launch) -> dict[str, str]:
    """Return the environment variables that are equal for all processes of this machine in all generations."""
    environ = shared_environment()
    if options.machines.most == 1:
        # On several machines, all launchers need the same key, so the user sets it.
        environ.setdefault(KEY, secrets.token_hex(32))
    return environ


def _process_environment(options: Launch, rank: int, gpus: Sequence[str], fds: Sequence[int]) -> dict[str, str]:
    """Return the environment variables that differ between processes."""
    environ = {"JAX_PROCESS_ID": str(rank)}
    if fds:
        environ[INHERITED_SOCKET] = str(fds[0])
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif options.gpus == 0:
        environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return environ
