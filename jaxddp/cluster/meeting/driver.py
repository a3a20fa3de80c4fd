"""Drives a launcher's state: collects the events, and performs the effects."""

import hashlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxddp.cluster.meeting.events import (
    Assignment,
    Effect,
    Event,
    JoinGeneration,
    LocalEnded,
    LocalFailed,
    RaiseError,
    Reach,
    SaveProcesses,
    Say,
    Send,
    Signalled,
    StartGeneration,
    State,
    StopProcesses,
    TimePassed,
)
from jaxddp.cluster.meeting.network import LauncherClient, LauncherServer
from jaxddp.cluster.meeting.states import Agent, Coordinator
from jaxddp.cluster.options import Launch
from jaxddp.cluster.worker_group import End, EventQueue, WorkerGroup
from jaxddp.core.errors import JaxddpError, about
from jaxddp.core.log import say
from jaxddp.job.environment import KEY, Job
from jaxddp.wire.addresses import LOOPBACK, address_of, is_loopback, listen, split_address

Listen = Callable[[], tuple[socket.socket | None, str]]
"""A function that returns the coordinator's listening socket and address. The socket is None if process 0 runs on
another machine."""


@dataclass(frozen=True)
class LocalStart:
    """The assignment of this machine in one start of the whole job."""

    assignment: Assignment
    listener: socket.socket | None = None
    """The listening socket of the coordinator, which process 0 of the job inherits."""


class Driver:
    """Handles events sequentially, in the main thread.

    Args:
        network: the connections to other launchers; None if the launchers do not meet.
    """

    def __init__(
        self, state: State, events: EventQueue, network: LauncherServer | LauncherClient | None, listen: Listen
    ):
        self._state, self._events, self._network, self._listen = state, events, network, listen
        self._local_start: LocalStart | None = None

    @property
    def code(self) -> int:
        """The exit code of the job, once it is over."""
        return self._state.code

    def next_start(self) -> LocalStart | None:
        """Wait for the next start of the job, and return this machine's part; None if the job is over.

        Raises:
            Unreachable: the other machines do not connect in time.
            InputError: the options of the machines do not match, or an address is invalid.
        """
        self._handle(TimePassed())
        while self._local_start is None and not self._state.is_over:
            event = self._events.next(self._state.wake)
            if event is None:
                event = TimePassed()
            self._handle(Signalled(event) if isinstance(event, signal.Signals) else event)
        local_start, self._local_start = self._local_start, None
        return local_start

    def run(self, group: WorkerGroup) -> None:
        """Handle the events while the processes of this machine run, until all have ended."""
        for event in group.watch(self._events):
            if event is not None:
                self._handle(LocalFailed(event) if isinstance(event, End) else event, group)
            if self._state.wake is not None and time.monotonic() >= self._state.wake:
                self._handle(TimePassed(), group)
        self._handle(LocalEnded(group.end()))

    def close(self, error: JaxddpError | None = None) -> None:
        """Disconnect from the other launchers. `error` is the error that ends this launcher, if any."""
        if self._network is not None:
            self._network.close(*self._state.last_messages(error))

    def _handle(self, event: Event, group: WorkerGroup | None = None) -> None:
        self._state, effects = self._state.after(event, time.monotonic())
        for effect in effects:
            self._perform(effect, group)

    def _perform(self, effect: Effect, group: WorkerGroup | None) -> None:
        match effect:
            case Say(line):
                say(f"jaxddp launch: {line}")
            case Send(machine, message):
                if self._network is not None:
                    self._network.send(machine, message)
            case Reach(seconds):
                assert isinstance(self._network, LauncherClient)
                self._network.reach(seconds)
            case StartGeneration():
                self._start(effect)
            case JoinGeneration(assignment):
                self._local_start = LocalStart(assignment)
            case StopProcesses(saved):
                if group is not None:
                    group.stop_with_others(saved=saved)
            case SaveProcesses():
                if group is not None:
                    group.save()
            case RaiseError(error):
                raise error

    def _start(self, start: StartGeneration) -> None:
        listener, address = self._listen()
        own, *others = (
            (machine, replace(assignment, coordinator=address)) for machine, assignment in start.assignments.items()
        )
        for machine, assignment in others:
            self._perform(Send(machine, assignment), None)
        self._local_start = LocalStart(own[1], listener)


def driver(options: Launch, processes: int, sizes: Sequence[int], events: EventQueue) -> Driver:
    """Return the driver of this machine's launcher, with connections if the launchers must meet.

    Args:
        processes: the number of processes on each machine.
        sizes: the numbers of machines that the job may have.

    Raises:
        InputError: the coordinator's address is invalid, or its port is taken.
    """
    name, now = _run_id(options), time.monotonic()
    if not options.launchers_meet:
        state = Coordinator.initial(options, processes, sizes, name, now)
        return Driver(state, events, None, lambda: _listen_alone(options))
    job, facts = _job_of_launchers(options), _facts(options, processes)
    if options.nr:
        return Driver(Agent(options), events, LauncherClient(job, facts, events.put), lambda: (None, ""))
    listener = _listen_at(options)
    host = listener.getsockname()[0]
    # A launcher that the user starts again numbers its generations from 0 again. A random suffix makes the run ids
    # unique.
    state = Coordinator.initial(options, processes, sizes, f"{name}.{secrets.token_hex(4)}", now)
    return Driver(state, events, LauncherServer(listener, job, facts, events.put), lambda: _listen_on(host))


def _listen_alone(options: Launch) -> tuple[socket.socket | None, str]:
    listener = None if options.nr else _listen_at(options)
    return listener, options.coordinator or (address_of(listener) if listener else "")


def _listen_on(host: str) -> tuple[socket.socket, str]:
    """Listen at a free port."""
    listener = listen(host, 0)
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


def _run_id(options: Launch) -> str:
    """Return the job's run id. All machines of the job compute the same id."""
    if options.run_id or options.machines.most == 1:
        return options.run_id or secrets.token_hex(8)
    return hashlib.sha256(str(options.coordinator).encode()).hexdigest()[:16]


def _job_of_launchers(options: Launch) -> Job:
    """Return a job whose processes are the launchers. Its run id differs from the run id of the workers."""
    assert options.coordinator is not None and options.nr is not None
    run_id, key = f"{_run_id(options)}/launchers", os.environ.get(KEY, "")
    return Job(options.coordinator, options.machines.most, options.nr, run_id=run_id, sources=(KEY,), key=key)


def _facts(options: Launch, processes: int) -> dict[str, str]:
    """Return the values that must be equal for all launchers."""
    return {"--nodes": options.nodes, "the number of processes (--processes or --gpus)": str(processes)}
