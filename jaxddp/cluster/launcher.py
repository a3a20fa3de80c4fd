"""Starts the processes of a job on this machine, gives each its place in the job, and waits for their end.

This process starts no JAX backend, which would take memory on every GPU.
"""

import hashlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Annotated

from jaxddp.cluster.machine import local_cores, local_gpus, shares
from jaxddp.cluster.output import say
from jaxddp.cluster.workers import Worker, WorkerGroup, caught_signals
from jaxddp.errors import InputError, about
from jaxddp.job.environment import KEY, RUN_ID
from jaxddp.job.host import INHERITED_SOCKET
from jaxddp.job.ports import LOOPBACK, is_loopback, listen, split_address
from jaxddp.overrides import check_values
from jaxddp.ranges import Range
from jaxddp.wording import nearest

COMMANDS = ("train", "eval", "find-lr", "predict", "doctor", "data")
"""A command that begins with one of these runs as `python -m jaxddp`."""
_EXAMPLE = "jaxddp launch --processes 2 -- train digits"


@dataclass(frozen=True)
class Launch:
    """Start a command in several processes; by default in one for each GPU of this machine."""

    processes: Annotated[int, Range(1, 10_000)] | None = None
    """Processes on this machine; its GPUs, if it has any, are divided evenly among them."""
    gpus: Annotated[int, Range(0, 10_000)] | None = None
    """GPUs of this machine to use, one process each; with 0 all processes compute on the CPU."""
    nodes: Annotated[int, Range(1, 100_000)] = 1
    """Machines in the job. Start the same command on each, with its own --nr."""
    nr: Annotated[int, Range(0, 99_999)] | None = None
    """This machine's number, from 0."""
    coordinator: str | None = None
    """HOST:PORT by which every machine reaches machine 0; for one machine, by default a free port of the loopback."""
    run_id: str | None = None
    """A name that distinguishes this job from others at the same address; the same on every machine."""
    logs: Path | None = None
    """Folder for the output of each process; by default `logs` in the command's --workdir, otherwise runs/launch."""
    cores: Annotated[int, Range(0, 100_000)] | None = None
    """Cores for each process; without GPUs by default an even share. With 0 every process uses all cores."""
    grace: Annotated[float, Range(0, 1_000_000)] = 10.0
    """Seconds between SIGTERM and SIGKILL for the other processes after one fails."""
    save_grace: Annotated[float, Range(0, 1_000_000)] = 120.0
    """Seconds between SIGTERM and SIGKILL after Ctrl-C or SIGTERM, when every process saves first."""


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the launcher and the command, which the first `--` separates.

    Raises `InputError` where there is no command, and the launcher's arguments do not ask for help.
    """
    words = list(arguments)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    if not command and not {"-h", "--help"} & set(own):
        raise InputError(f"launch: no command; it follows a --, as in: {_EXAMPLE}")
    return own, command


def launch(options: Launch, command: Sequence[str]) -> int:
    """Run a command in every process of this machine, and wait for their end. Call it from the main thread.

    Each process is a direct child in a session of its own, with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES,
    JAX_PROCESS_ID and JAXDDP_RUN_ID in its environment, on one machine JAXDDP_JOB_KEY, and CUDA_VISIBLE_DEVICES where
    GPUs are divided. Process 0 of the job also inherits a socket that listens at the coordinator's address;
    JAXDDP_COORDINATOR_FD holds its number.
    Their output is shown line by line after `[R] `, and kept in `process-R.log`. Returns the code of
    `WorkerGroup.watch`.

    Args:
        command: the arguments of `jaxddp` (`train digits`), or any program; `python` is this interpreter.

    Raises:
        InputError: options that contradict each other or this machine, or a command that does not exist.
    """
    program = _program(command)
    _check(options)
    gpus, cores = _shares(options)
    logs = options.logs or _default_logs(command)
    first_rank = (options.nr or 0) * len(gpus)
    with caught_signals() as received, closing(WorkerGroup(options.grace, options.save_grace)) as group:
        # Closed here once process 0 holds it: otherwise others could still connect to it after process 0 ended.
        with _listener(options) or nullcontext() as listener:
            shared = _job_environment(options, len(gpus), listener)
            total = _counted(options.nodes * len(gpus), "process", "es")
            machines = f" on {options.nodes} machines" if options.nodes > 1 else ""
            say(f"jaxddp launch: {total}{machines}, coordinator {shared['JAX_COORDINATOR_ADDRESS']}, output in {logs}")
            for rank, own_gpus, own_cores in zip(count(first_rank), gpus, cores, strict=False):
                inherited = [listener.fileno()] if listener and rank == 0 else []
                environ = shared | _own_environment(options, rank, own_gpus, inherited)
                log = logs / f"process-{rank}.log"
                group.workers.append(Worker.start(rank, program, environ, log, cores=own_cores, pass_fds=inherited))
        return group.watch(received)


def _program(command: Sequence[str]) -> list[str]:
    word = command[0]
    if word in COMMANDS:
        return [sys.executable, "-m", "jaxddp", *command]
    if word in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if shutil.which(word) is None:
        raise InputError(f"launch: {word!r} is neither a command of jaxddp nor a program{nearest(word, COMMANDS)}")
    return list(command)


def _check(options: Launch) -> None:
    """Check the options without looking at the machine."""
    check_values(options, "--")
    if options.nodes > 1 and options.coordinator is None:
        raise InputError(f"--nodes {options.nodes}: give --coordinator HOST:PORT, an address of machine 0")
    if options.nodes > 1 and options.nr is None:
        raise InputError(f"--nodes {options.nodes}: give --nr, this machine's number, 0 to {options.nodes - 1}")
    if options.nr is not None and not 0 <= options.nr < options.nodes:
        raise InputError(f"--nr {options.nr}: expected 0 to {options.nodes - 1}, for --nodes {options.nodes}")
    if options.coordinator is not None:
        with about(f"--coordinator {options.coordinator}"):
            split_address(options.coordinator)


def _shares(options: Launch) -> tuple[list[Sequence[str]], list[Sequence[int]]]:
    """The GPUs of each process, as CUDA names them, and its cores; an empty sequence of cores means all."""
    seen = local_gpus()
    gpus = seen if options.gpus is None else seen[: options.gpus]
    if options.gpus is not None and options.gpus > len(seen):
        raise InputError(f"--gpus {options.gpus}: a process here would see {len(seen)}; --processes P needs none")
    processes = len(gpus) if options.processes is None else options.processes
    if processes == 0:
        raise InputError("launch: no GPU to start a process for; say how many to start: --processes P")
    if len(gpus) % processes:
        raise InputError(
            f"--processes {processes}: {len(gpus)} GPUs cannot be shared evenly; --gpus K takes some of them, 0 none"
        )
    return shares(gpus, processes), _cores(options, processes, pinned=not gpus)


def _cores(options: Launch, processes: int, *, pinned: bool) -> list[Sequence[int]]:
    mine = local_cores()
    if options.cores:
        if options.cores * processes > len(mine):
            needed = f"{_counted(processes, 'process', 'es')} would need {options.cores * processes}"
            raise InputError(f"--cores {options.cores}: {needed}, and this one may use {len(mine)}")
        mine = mine[: options.cores * processes]
    elif processes > len(mine):
        say(f"jaxddp launch: oversubscribed: {processes} processes on {_counted(len(mine), 'core')}")
        pinned = False
    if options.cores == 0 or not (options.cores or pinned) or not hasattr(os, "sched_setaffinity"):
        return [()] * processes
    return shares(mine, processes)


def _listener(options: Launch) -> socket.socket | None:
    """The socket at which process 0 of the job listens, if it runs on this machine."""
    if options.nr:
        return None
    host, port = split_address(options.coordinator) if options.coordinator else (LOOPBACK, 0)
    with about(f"--coordinator {options.coordinator or LOOPBACK}"):
        listener = listen(host, port)
    if options.nodes > 1 and is_loopback(listener.getsockname()[0]) and not is_loopback(host):
        # Debian's /etc/hosts maps a machine's own name to such an address.
        say(
            f"jaxddp launch: {host} is {listener.getsockname()[0]} here, where no other machine reaches it: give its IP"
        )
    return listener


def _job_environment(options: Launch, processes: int, listener: socket.socket | None) -> dict[str, str]:
    """The environment that all processes of this machine share."""
    # These belong to one process, and a launcher may have started this one.
    ours = {INHERITED_SOCKET, "JAX_LOCAL_DEVICE_IDS"}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    # Measured: huge pages for malloc make a training step on a CPU 9 to 20% faster.
    environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # Otherwise the last lines of a process that is killed would be lost in its buffer.
    environ.setdefault("PYTHONUNBUFFERED", "1")
    address, run_id = options.coordinator, options.run_id
    if address is None:
        assert listener is not None
        address = "{}:{}".format(*listener.getsockname())
    if run_id is None:
        alone = options.nodes == 1
        run_id = secrets.token_hex(8) if alone else hashlib.sha256(address.encode()).hexdigest()[:16]
    if options.nodes == 1:
        # Of several machines each has a launcher, and the key is the user's.
        environ.setdefault(KEY, secrets.token_hex(32))
    return environ | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(options.nodes * processes),
        RUN_ID: run_id,
    }


def _own_environment(options: Launch, rank: int, gpus: Sequence[str], inherited: Sequence[int]) -> dict[str, str]:
    """The environment of one process, beside the shared one."""
    environ = {"JAX_PROCESS_ID": str(rank)}
    if inherited:
        environ[INHERITED_SOCKET] = str(inherited[0])
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif options.gpus == 0:
        environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    return environ


def _default_logs(command: Sequence[str]) -> Path:
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        if word == "--workdir" and following:
            return Path(following) / "logs"
        if word.startswith("--workdir="):
            return Path(word.partition("=")[2]) / "logs"
    return Path("runs/launch")


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
