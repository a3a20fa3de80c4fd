"""Several processes on a Ray cluster, each with GPUs or CPUs that Ray gives it:

    python launch/ray_job.py --processes 16 --gpus 1 --restarts 3 -- train imagenet_resnet50 \\
        --data.path /data/imagenet --workdir /shared/runs/first
    python launch/ray_job.py --processes 2 -- train digits --data.path /data/digits --workdir /shared/runs/digits

It runs where a driver of Ray runs: on a machine of the cluster, or as a Ray job (`ray job submit -- python …`). jaxddp
is installed on all machines, the work directory is one that all of them share, and paths are absolute.

Each process is the child of an actor, which ends with it. The first failure ends the others, in bounded time, and its
code is returned: as of `jaxddp launch`, 2 for a mistake, 75 for a run that was asked to stop and saved. With --restarts
the job starts again from its last checkpoint after every failure but a mistake.
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
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.wording import first_line
from jaxddp.job.environment import KEY, RUN_ID
from jaxddp.job.leader import INHERITED_SOCKET
from jaxddp.job.ports import listen

FORWARDED = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "JAXDDP_CACHE", "JAXDDP_DATASETS")
"""Variables of this machine that all processes are given; all others are those of their machines."""
PREEMPTED = 75
MOMENT, GRACE, SAVE_GRACE = 2.0, 10.0, 120.0
"""Seconds in which the others end by themselves after a failure, from then to SIGKILL, and the same where all save."""
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the first restart, doubled before each that follows."""


class Member:
    """An actor: one process of the job, on the machine and with the devices that Ray chose."""

    _process: subprocess.Popen[bytes]
    _output: int

    def __init__(self):
        self._listener: socket.socket | None = None
        self._rest = b""

    def place(self) -> tuple[str, list[str]]:
        """The address of its machine, and its GPUs."""
        return ray.util.get_node_ip_address(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def listen(self) -> str:
        """Of process 0: the coordinator's address. The process inherits the socket, so nobody else takes the port."""
        self._listener = listen(ray.util.get_node_ip_address(), 0)
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the process, which the kernel kills when this actor ends."""
        inherited = [self._listener.fileno()] if self._listener else []
        own = {INHERITED_SOCKET: str(inherited[0])} if inherited else {}
        as_child = [sys.executable, "-I", "-S", starter.__file__, str(os.getpid()), ""]
        self._process = subprocess.Popen(
            [*as_child, sys.executable, "-m", "jaxddp", *words],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ, **own},
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
        """The next lines of its output, at the latest after half a second; and its code once it has ended."""
        if not select.select([self._output], [], [], 0.5)[0]:
            # Something that it has started may hold its output open.
            return [], self._process.poll()
        piece = os.read(self._output, 1 << 16)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if not piece and self._rest:
            lines.append(self._rest)
        return [line.decode(errors="replace") for line in lines], None if piece else self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the process and what it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


class End(NamedTuple):
    """How one start of the job ended."""

    code: int
    cause: str
    asked: bool = False
    """Whether it was asked to stop."""


class Job:
    """One start of all processes, whose actors are in order of their ids."""

    def __init__(self, members: Sequence[Any]):
        self._members, self._ends = members, dict[int, int]()
        self._asked: signal.Signals | None = None

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        shared = {
            **environ,
            "JAX_COORDINATOR_ADDRESS": ray.get(self._members[0].listen.remote()),
            "JAX_NUM_PROCESSES": str(len(self._members)),
            RUN_ID: secrets.token_hex(8),
        }
        each = [shared | {"JAX_PROCESS_ID": str(rank)} for rank in range(len(self._members))]
        ray.get([member.start.remote(words, own) for member, own in zip(self._members, each, strict=True)])

    def watch(self, received: list[signal.Signals]) -> End:
        """Show what all say until all have ended. Signals that this process receives are appended to the list."""
        pending = {member.read.remote(): rank for rank, member in enumerate(self._members)}
        plan: list[tuple[float, signal.Signals]] = []
        while pending:
            for reference in ray.wait(list(pending), timeout=0.5)[0]:
                rank = pending.pop(reference)
                if self._show(rank, reference) is None:
                    pending[self._members[rank].read.remote()] = rank
            if received:
                plan = self._stop(received.pop(0)) or plan
            if any(self._ends.values()) and not plan:
                saving = set(self._ends.values()) <= {0, PREEMPTED}
                plan = deadlines(GRACE, SAVE_GRACE if saving else MOMENT)
            while plan and plan[0][0] <= time.monotonic():
                _, number = plan.pop(0)
                for rank in pending.values():
                    self._members[rank].send.remote(number)
                if not plan:
                    # An actor whose machine is gone will never answer.
                    self._ends |= dict.fromkeys(pending.values(), -signal.SIGKILL)
                    pending.clear()
        return self._end()

    def _show(self, rank: int, reference: ray.ObjectRef) -> int | None:
        """Print what a process says, and note its end, if it has come."""
        try:
            lines, code = ray.get(reference)
        except RayActorError:
            lines, code = ["its Ray actor is gone"], -signal.SIGKILL
        print(*(f"[{rank}] {line}" for line in lines), sep="\n", end="\n" * bool(lines), flush=True)
        if code is not None:
            self._ends[rank] = code
        return code

    def _stop(self, number: signal.Signals) -> list[tuple[float, signal.Signals]]:
        """What follows from a signal: all save and stop; on another Ctrl-C they are killed."""
        if self._asked:
            return [(time.monotonic(), signal.SIGKILL)] if number == signal.SIGINT else []
        self._asked = number
        say(f"{number.name}: every process was asked to save and stop; another Ctrl-C kills them")
        return deadlines(SAVE_GRACE)

    def _end(self) -> End:
        """Of the first that was killed, or else of the first that failed."""
        failed = {rank: code for rank, code in self._ends.items() if code}
        rank = next((rank for rank, code in failed.items() if code < 0), next(iter(failed), 0))
        code = self._ends[rank]
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if self._asked and not set(self._ends.values()) <= {0, PREEMPTED}:
            code = -self._asked
        return End(code if code >= 0 else 128 - code, f"process {rank}: {how}", self._asked is not None)


def deadlines(kill: float, terminate: float = 0) -> list[tuple[float, signal.Signals]]:
    """When to send what to those that still run."""
    now = time.monotonic()
    return [(now + terminate, signal.SIGTERM), (now + terminate + kill, signal.SIGKILL)]


def reserve(options: argparse.Namespace, received: list[signal.Signals]) -> PlacementGroup:
    """Room for all processes at once, on few machines. Raises: InputError; there is none in time."""
    bundle = {"CPU": float(options.cpus), "GPU": float(options.gpus)}
    room, give_up = placement_group([bundle] * options.processes, strategy="PACK"), time.monotonic() + options.wait
    while not room.wait(0.5):
        if received or time.monotonic() > give_up:
            remove_placement_group(room)
            has = {name: ray.cluster_resources().get(name, 0.0) for name in bundle}
            raise InputError(
                f"Ray has no room for {options.processes} processes with {bundle} each, of {has} in all, in "
                f"{options.wait:g} s; start fewer, or give --wait more seconds"
            )
    return room


def place(room: PlacementGroup, options: argparse.Namespace) -> list[Any]:
    """An actor for each process, in order of their ids: those of one machine follow each other."""
    actor: Any = ray.remote(Member)
    resources = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    bundles = [PlacementGroupSchedulingStrategy(room, index) for index in range(options.processes)]
    created = [actor.options(**resources, scheduling_strategy=bundle).remote() for bundle in bundles]
    places = ray.get([member.place.remote() for member in created])
    return [created[index] for index in sorted(range(len(created)), key=places.__getitem__)]


def attempt(options: argparse.Namespace, environ: Mapping[str, str], received: list[signal.Signals]) -> End:
    """Start the job once, and see it end; nothing of it is left."""
    room = reserve(options, received)
    try:
        job = Job(place(room, options))
        job.start(options.command, environ)
        return job.watch(received)
    except RayActorError as error:
        return End(1, f"an actor was lost at the start ({first_line(error)})")
    finally:
        # With its room an actor ends, and with it its process.
        remove_placement_group(room)


def run(options: argparse.Namespace, received: list[signal.Signals]) -> int:
    """Start the job, and again after a failure while restarts are left; the code of its last end."""
    environ = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    environ |= {KEY: os.environ.get(KEY) or secrets.token_hex(32)}
    if not options.gpus:
        environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    restarts = 0
    while True:
        end = attempt(options, environ, received)
        if end.code in (0, InputError.exit_code) or end.asked or restarts == options.restarts:
            break
        pause = min(PAUSE * 2**restarts, LONGEST_PAUSE)
        restarts += 1
        say(f"{end.cause}; restart {restarts} of {options.restarts} in {pause:g} s")
        if interrupted(pause, received):
            break
    if end.code:
        say(end.cause)
    return end.code


def interrupted(seconds: float, received: list[signal.Signals]) -> bool:
    """Wait; whether a signal came meanwhile, or while the job ended."""
    end = time.monotonic() + seconds
    while not received and time.monotonic() < end:
        time.sleep(0.1)
    return bool(received)


def say(line: str) -> None:
    print(f"ray_job.py: {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="in the job")
    parser.add_argument("--gpus", type=int, default=0, help="of each process (default: none, it computes on the CPU)")
    parser.add_argument("--cpus", type=int, default=1, help="of each process")
    parser.add_argument("--restarts", type=int, default=0, help="starts after a failure, from the last checkpoint")
    parser.add_argument("--wait", type=float, default=600, help="seconds for Ray to find room")
    parser.add_argument("--address", help="of the cluster (default: Ray's own rule; `local` starts a Ray of its own)")
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
        say(str(error))
        return error.exit_code
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
