"""Runs a jaxddp command as several processes on a Ray cluster, each with its GPUs or CPUs:

    python launch/ray_job.py --processes 16 --gpus 1 --restarts 3 -- train imagenet_resnet50 \\
        --data.path /data/imagenet --workdir /shared/runs/first
    python launch/ray_job.py --processes 2 -- train digits --data.path /data/digits --workdir /shared/runs/digits

Run the script where a Ray driver can run: on a machine of the cluster, or as a Ray job (`ray job submit -- python …`).
All machines must have jaxddp and share the work directory. Paths must be absolute.

Each process is the child of an actor, and ends with the actor. The first failure ends the other processes in bounded
time. The exit codes are those of `jaxddp launch`: 2 for a mistake of the user, 75 for a run that saved and stopped on
request, here also by Ctrl-C. With --restarts, the job restarts from its last checkpoint after every failure except a
mistake of the user.

Ray Train's `JaxTrainer` is not used: it restarts even after mistakes, does not report exit codes, and stops workers
before they save.
"""

import argparse
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import jaxddp.cluster.starter as starter
from jaxddp.core.errors import InputError, JaxddpError, first_line
from jaxddp.job.control_plane import INHERITED_SOCKET
from jaxddp.job.environment import KEY, RUN_ID
from jaxddp.job.messages import listen

FORWARDED = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "JAXDDP_CACHE", "JAXDDP_DATASETS")
"""Environment variables of this machine that are set in all processes. Other variables come from their machines."""
PREEMPTED = 75
MOMENT, GRACE, SAVE_GRACE = 2.0, 10.0, 120.0
"""Seconds from a failure to SIGTERM; from SIGTERM to SIGKILL; and from SIGTERM to SIGKILL while processes save."""
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the first restart, doubled before each further restart; and their maximum."""


class Member:
    """An actor that runs one process of the job on the machine and devices that Ray chose."""

    _process: subprocess.Popen[bytes]
    _output: int

    def __init__(self):
        self._listener: socket.socket | None = None
        self._rest = b""

    def location(self) -> tuple[str, list[str]]:
        """Return the address of the actor's machine, and the actor's GPUs."""
        return ray.util.get_node_ip_address(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def listen(self) -> str:
        """Return the coordinator's address. Only process 0 calls this, and inherits the listening socket."""
        self._listener = listen(ray.util.get_node_ip_address(), 0)
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the process. The kernel kills it when this actor ends."""
        inherited = [self._listener.fileno()] if self._listener else []
        variables = {INHERITED_SOCKET: str(inherited[0])} if inherited else {}
        starter_command = [sys.executable, "-I", "-S", starter.__file__, str(os.getpid()), ""]
        self._process = subprocess.Popen(
            [*starter_command, sys.executable, "-m", "jaxddp", *words],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        if self._listener:
            self._listener.close()

    def read(self) -> tuple[list[str], int | None]:
        """Return the new lines of output, and the exit code if the process has ended, within half a second."""
        if not select.select([self._output], [], [], 0.5)[0]:
            # The process may have ended although a child process keeps its output open.
            return [], self._process.poll()
        piece = os.read(self._output, 1 << 16)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if not piece and self._rest:
            lines.append(self._rest)
        return [line.decode(errors="replace") for line in lines], None if piece else self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


class End(NamedTuple):
    """How one start of the job ended."""

    code: int
    cause: str
    is_stopped: bool = False
    """Whether a signal asked the job to stop."""


class Job:
    """One start of all processes. The actors are in the order of the process ids."""

    def __init__(self, members: Sequence[Any]):
        self._members, self._codes = members, dict[int, int]()
        self._stop_signal: signal.Signals | None = None

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        shared = {
            **environ,
            "JAX_COORDINATOR_ADDRESS": ray.get(self._members[0].listen.remote()),
            "JAX_NUM_PROCESSES": str(len(self._members)),
            RUN_ID: secrets.token_hex(8),
        }
        environs = [shared | {"JAX_PROCESS_ID": str(rank)} for rank in range(len(self._members))]
        started = zip(self._members, environs, strict=True)
        ray.get([member.start.remote(words, variables) for member, variables in started])

    def watch(self, received: list[signal.Signals]) -> End:
        """Print the output of all processes until all have ended. A signal handler appends to `received`."""
        pending = {member.read.remote(): rank for rank, member in enumerate(self._members)}
        plan: list[tuple[float, signal.Signals]] = []
        while pending:
            for reference in ray.wait(list(pending), timeout=0.5)[0]:
                rank = pending.pop(reference)
                if self._show(rank, reference) is None:
                    pending[self._members[rank].read.remote()] = rank
            if received:
                plan = self._stop(received.pop(0)) or plan
            if any(self._codes.values()) and not plan:
                saving = set(self._codes.values()) <= {0, PREEMPTED}
                plan = deadlines(GRACE, SAVE_GRACE if saving else MOMENT)
            while plan and plan[0][0] <= time.monotonic():
                _, number = plan.pop(0)
                for rank in pending.values():
                    self._members[rank].send.remote(number)
                if not plan:
                    # The actor of a lost machine never returns a result.
                    self._codes |= dict.fromkeys(pending.values(), -signal.SIGKILL)
                    pending.clear()
        return self._end()

    def _show(self, rank: int, reference: ray.ObjectRef) -> int | None:
        """Print the output of a process, and record its exit code if it has ended."""
        try:
            lines, code = ray.get(reference)
        except RayActorError:
            lines, code = ["its Ray actor is gone"], -signal.SIGKILL
        print(*(f"[{rank}] {line}" for line in lines), sep="\n", end="\n" * bool(lines), flush=True)
        if code is not None:
            self._codes[rank] = code
        return code

    def _stop(self, number: signal.Signals) -> list[tuple[float, signal.Signals]]:
        """Return the signals to send after a received one: SIGTERM to save and stop, SIGKILL after a second Ctrl-C."""
        if self._stop_signal:
            return [(time.monotonic(), signal.SIGKILL)] if number == signal.SIGINT else []
        self._stop_signal = number
        report(f"{number.name}: every process was asked to save and stop; another Ctrl-C kills them")
        return deadlines(SAVE_GRACE)

    def _end(self) -> End:
        """Return the end of the first killed process, or else of the first failed process."""
        failed = {rank: code for rank, code in self._codes.items() if code}
        rank = next((rank for rank, code in failed.items() if code < 0), next(iter(failed), 0))
        code = self._codes[rank]
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if self._stop_signal and not set(self._codes.values()) <= {0, PREEMPTED}:
            code = -self._stop_signal
        return End(code if code >= 0 else 128 - code, f"process {rank}: {how}", self._stop_signal is not None)


def deadlines(kill: float, terminate: float = 0) -> list[tuple[float, signal.Signals]]:
    """Return the times and signals to send to the processes that still run."""
    now = time.monotonic()
    return [(now + terminate, signal.SIGTERM), (now + terminate + kill, signal.SIGKILL)]


def reserve(options: argparse.Namespace, received: list[signal.Signals]) -> PlacementGroup:
    """Reserve resources for all processes, on few machines, or end after a signal. Raises InputError after --wait."""
    bundle = {"CPU": float(options.cpus), "GPU": float(options.gpus)}
    group, deadline = placement_group([bundle] * options.processes, strategy="PACK"), time.monotonic() + options.wait
    while not (received or group.wait(0.5)):
        if not received and time.monotonic() > deadline:
            remove_placement_group(group)
            has = {name: ray.cluster_resources().get(name, 0.0) for name in bundle}
            raise InputError(
                f"Ray did not reserve {bundle} for each of {options.processes} processes in {options.wait:g} s; the "
                f"cluster has {has}; start fewer processes, or raise --wait"
            )
    return group


def create_actors(group: PlacementGroup, options: argparse.Namespace) -> list[Any]:
    """Create an actor for each process. Processes of one machine have consecutive ids."""
    actor: Any = ray.remote(Member)
    resources = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    bundles = [PlacementGroupSchedulingStrategy(group, index) for index in range(options.processes)]
    created = [actor.options(**resources, scheduling_strategy=bundle).remote() for bundle in bundles]
    locations = ray.get([member.location.remote() for member in created])
    return [created[index] for index in sorted(range(len(created)), key=locations.__getitem__)]


def attempt(options: argparse.Namespace, environ: Mapping[str, str], received: list[signal.Signals]) -> End:
    """Run the job once. All its processes have ended afterwards."""
    group = reserve(options, received)
    try:
        if received:
            return End(128 + received[0], f"{received[0].name} before the start", is_stopped=True)
        job = Job(create_actors(group, options))
        job.start(options.command, environ)
        return job.watch(received)
    except RayActorError as error:
        return End(1, f"an actor was lost at the start ({first_line(error)})")
    finally:
        # The removal of the placement group ends its actors and their processes.
        remove_placement_group(group)


def run(options: argparse.Namespace, received: list[signal.Signals]) -> int:
    """Run the job, and restart it after failures while restarts are left. Return the last exit code."""
    environ = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    environ |= {KEY: os.environ.get(KEY) or secrets.token_hex(32)}
    if not options.gpus:
        environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    restarts, end = 0, End(0, "")
    while True:
        try:
            end = attempt(options, environ, received)
        except InputError as error:
            # After a failure, it is no mistake of the user that the resources do not return in time.
            error.exit_code = end.code or error.exit_code
            raise
        if end.code in (0, InputError.exit_code) or end.is_stopped or restarts == options.restarts:
            break
        restarts, pause = restarts + 1, min(PAUSE * 2**restarts, LONGEST_PAUSE)
        report(f"{end.cause}; restart {restarts} of {options.restarts} in {pause:g} s")
        if interrupted(pause, received):
            break
    if end.code:
        report(end.cause)
    return end.code


def interrupted(seconds: float, received: list[signal.Signals]) -> bool:
    """Wait, and return whether a signal was received."""
    end = time.monotonic() + seconds
    while not received and time.monotonic() < end:
        time.sleep(0.1)
    return bool(received)


def report(line: str) -> None:
    print(f"ray_job.py: {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="number of processes in the job")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each process (default: none; the CPU is used)")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each process")
    parser.add_argument("--restarts", type=int, default=0, help="restarts after failures, from the last checkpoint")
    parser.add_argument("--wait", type=float, default=600, help="maximum seconds to wait for resources")
    parser.add_argument("--address", help="address of the cluster (default: Ray's default; `local` starts a new Ray)")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="of jaxddp, such as `-- train digits …`")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    ray.init(address=options.address, include_dashboard=False, log_to_driver=False)
    received: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
    try:
        return run(options, received)
    except JaxddpError as error:
        report(str(error))
        return error.exit_code
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
