"""The states of the launchers of a job. Machines, networks and clocks are simulated.

The machines of `World` fail, vanish, lose their connections and return in any order. A generation starts only after
the previous generation has ended, and all launchers end with one exit code.
"""

import re
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxddp.cluster.network import Arrived, Disconnected, Event, LauncherClient
from jaxddp.cluster.options import Launch
from jaxddp.cluster.states import Agent, Assignment, Coordinator, JobEnded, Notice, Stop
from jaxddp.cluster.worker import End, Failure, WorkerGroup
from jaxddp.core.errors import Unreachable

PROCESSES = 2
DONE, SAVED, KILLED = End(0, "done"), End(75, "asked to stop"), End(143, "process 1: killed by SIGTERM")
MISTAKE, QUIT = End(2, "a mistake"), End(1, "x", user_exit=True)


def processes(did: Callable[..., Any], generation: int = 0) -> Any:
    """Return the running processes of a machine. `did` is called with everything that the launcher does to them."""
    group = MagicMock(WorkerGroup, generation=generation)
    group.save, group.stop_with_others = lambda: did("save"), lambda *, saved: did("stop", saved)
    return group


def member(nodes: str, restarts: int, nr: int, did: Callable[..., Any], clock: Callable[[], float], sizes=()) -> Any:
    """Return the launcher of a machine."""
    options = Launch(PROCESSES, None, nodes, nr, "host0:1", restarts, wait=30.0, settle=5.0, join_after=10.0)
    network = MagicMock(LauncherClient, send=did)
    both = {"options": options, "events": SimpleQueue(), "network": network, "clock": clock}
    if nr and options.launchers_meet:
        return Agent(**both, reach=lambda seconds: did("reach", seconds))
    allowed = sizes or range(options.machines.least, options.machines.most + 1)
    counts = allowed if options.launchers_meet else [1]
    return Coordinator(**both, processes=PROCESSES, counts=counts, name="name", listen=lambda: None)


class World:
    """A simulation of machines, each with a launcher and processes, and of the network between them."""

    def __init__(self, nodes: str, restarts: int):
        self.nodes, self.restarts, self.now = nodes, restarts, 0.0
        self.launchers, self.reaching, self.connected = dict[int, Any](), set[int](), set[int]()
        self.coordinator = self.add(0)
        self.most = self.coordinator.options.machines.most
        for machine in range(1, self.most):
            self.add(machine)
        self.queues = {machine: deque[Event]() for machine in range(self.most)}
        # The ends of the processes that a launcher has stopped.
        self.stopped = dict[int, End]()
        self.run_ids = list[str]()
        for machine in range(self.most):
            self.handle(machine, None)

    def add(self, machine: int) -> Any:
        def did(what: object, *details: object) -> None:
            self.did(machine, what, *details)

        self.launchers[machine] = member(self.nodes, self.restarts, machine, did, lambda: self.now)
        return self.launchers[machine]

    def did(self, machine: int, what: Any, *details: Any) -> None:
        if what == "reach":
            self.reaching.add(machine)
        elif what in ("stop", "save"):
            self.stopped.setdefault(machine, KILLED if details == (False,) else SAVED)
        elif (machine or what) in self.connected:
            if isinstance(details[0], Assignment):
                self.check_assignment(what, details[0])
            self.queues[what].append(Event(machine, details[0]))

    def handle(self, machine: int, event: Event | signal.Signals | None) -> None:
        launcher = self.launchers[machine]
        if launcher.is_over:
            return
        try:
            launcher.handle(event)
        except Unreachable:
            assert launcher.is_over
        if launcher.local_start:
            assignment, launcher.local_start = launcher.local_start, None
            if not machine:
                # The previous generation has ended on every machine that is still connected.
                assert not self.running() & (self.connected | {0})
                assert len(launcher.generation.members) in launcher.counts and launcher.budget.used <= self.restarts
                assert assignment.run_id not in self.run_ids
                self.run_ids.append(assignment.run_id)
                self.check_assignment(0, assignment)
            assert launcher.group is None
            self.stopped.pop(machine, None)
            launcher.group = processes(lambda *what: self.did(machine, *what), assignment.generation)
        # A launcher that waits without running processes is woken by a message or by its clock.
        elif not launcher.group and not launcher.is_over:
            is_awaited = launcher.is_connected if machine else launcher.generation.pending
            assert is_awaited or launcher.wake is not None
        if launcher.is_over:
            self.close(machine)

    def running(self) -> set[int]:
        return {machine for machine, launcher in self.launchers.items() if launcher.group}

    def check_assignment(self, machine: int, assignment: Assignment) -> None:
        members = self.coordinator.generation.members
        assert members[0] == 0 and set(members) <= self.coordinator.present.keys()
        assert assignment.first_rank == members.index(machine) * PROCESSES
        assert assignment.processes == len(members) * PROCESSES and assignment.run_id == f"name.{assignment.generation}"

    def close(self, machine: int) -> None:
        """End a launcher after its last messages."""
        for other in list(self.connected) if machine == 0 else [machine] * (machine in self.connected):
            receiver = 0 if machine else other
            for content in (*self.launchers[machine].last_messages(None), Disconnected("left")):
                self.queues[receiver].append(Event(machine, content))
            self.connected.discard(other)
        self.launchers[machine].group = None
        self.reaching.discard(machine)

    def deliver(self, machine: int, _: End) -> None:
        if self.queues[machine]:
            self.handle(machine, self.queues[machine].popleft())

    def end(self, machine: int, end: End) -> None:
        """End the processes of a machine."""
        if group := self.launchers[machine].group:
            end = replace(end, generation=group.generation)
            if end.code not in (0, 75) and not end.stop_requested:
                self.handle(machine, Event(machine, Failure(**vars(end))))
            self.launchers[machine].group = None
            self.handle(machine, Event(machine, end))

    def connect(self, machine: int, _: End) -> None:
        if machine in self.reaching:
            self.reaching.discard(machine)
            if self.coordinator.is_over:
                self.queues[machine].append(Event(0, Unreachable("nobody is there")))
            else:
                self.connected.add(machine)
                self.queues[machine].append(Event(0, Arrived("host0")))
                self.queues[0].append(Event(machine, Arrived(f"host{machine}")))

    def cut(self, machine: int, _: End) -> None:
        """Break a connection."""
        if machine in self.connected:
            self.connected.discard(machine)
            self.queues[machine].append(Event(0, Disconnected("was lost")))
            self.queues[0].append(Event(machine, Disconnected("was lost")))

    def vanish(self, machine: int, _: End) -> None:
        """Remove a machine other than 0, and add it again as a new one."""
        if machine:
            if machine in self.connected:
                self.connected.discard(machine)
                self.queues[0].append(Event(machine, Disconnected("was lost")))
            self.reaching.discard(machine)
            self.queues[machine].clear()
            self.add(machine)
            self.handle(machine, None)

    def signal(self, machine: int, _: End) -> None:
        if machine in self.running():
            self.end(machine, replace(SAVED, stop_requested=True))
        else:
            self.handle(machine, signal.SIGTERM)

    def wait(self, machine: int, _: End) -> None:
        launcher = self.launchers[machine]
        if not launcher.is_over and launcher.wake is not None:
            self.now = max(self.now, launcher.wake)
            self.handle(machine, None)

    def start(self) -> None:
        """Connect all machines, which starts the processes on them."""
        for machine in sorted(self.reaching):
            self.connect(machine, DONE)
        while busy := [machine for machine, queue in self.queues.items() if queue]:
            self.deliver(busy[0], DONE)

    def settle(self) -> None:
        """Continue without further failures until all launchers have ended."""
        for _ in range(3000):
            waiting = {machine: one for machine, one in self.launchers.items() if not one.is_over}
            if not waiting:
                return
            if busy := [machine for machine, queue in self.queues.items() if queue]:
                self.deliver(busy[0], DONE)
            elif self.reaching:
                self.connect(min(self.reaching), DONE)
            elif running := self.running():
                machine = min(running)
                self.end(machine, self.stopped.get(machine, DONE))
            else:
                wakes = {machine: one.wake for machine, one in waiting.items() if one.wake is not None}
                assert wakes, "all wait for each other"
                self.wait(min(wakes, key=wakes.__getitem__), DONE)
        raise AssertionError("no end")


ACTIONS: list[Callable[[World, int, End], None]] = [
    *(World.deliver, World.deliver, World.deliver, World.end, World.connect, World.connect, World.wait),
    *(World.cut, World.vanish, World.signal),
]
ENDS = [DONE, SAVED, KILLED, End(137, "process 0: killed by SIGKILL"), MISTAKE, QUIT]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["2", "3", "1:2", "1:3", "2:4"]),
    st.integers(0, 3),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.sampled_from(ENDS)), max_size=40),
)
def test_any_sequence_of_events_ends_with_one_exit_code_for_all_machines(nodes, restarts, is_started, actions):
    # With a fixed number of machines, launchers connect to each other only if restarts are allowed.
    world = World(nodes, restarts if ":" in nodes else max(restarts, 1))
    if is_started:
        world.start()
        assert world.run_ids == ["name.0"]
    for action, machine, end in actions:
        action(world, machine % world.most, end)
    world.settle()
    agents = [world.launchers[machine] for machine in range(1, world.most)]
    informed = [agent for agent in agents if agent.job_code is not None and not agent.is_signalled]
    assert {agent.code for agent in informed} <= {world.coordinator.code}


class Lone:
    """A launcher whose network, processes and clock are simulated. `does` returns what it does at an event."""

    def __init__(self, capsys, nodes: str, restarts: int = 3, nr: int = 0, sizes: tuple[int, ...] = ()):
        self.capsys, self.now, self.done = capsys, 0.0, list[tuple[Any, ...]]()
        self.launcher = member(nodes, restarts, nr, self.did, lambda: self.now, sizes)

    def did(self, *what: Any) -> None:
        self.done.append(what)

    def does(self, now: float, *events: Event | signal.Signals | None) -> list[tuple[Any, ...]]:
        """Return what the launcher does at the last of some events, with the lines that it prints."""
        self.now = now
        for event in events:
            self.done.clear()
            self.capsys.readouterr()
            self.launcher.handle(event)
        return [(line,) for line in self.capsys.readouterr().err.splitlines()] + self.done

    def start(self) -> Assignment:
        """Return the assignment of this machine, and run its processes."""
        start, self.launcher.local_start = self.launcher.local_start, None
        self.launcher.group = processes(self.did)
        return start

    def assigned(self) -> list[int]:
        return [self.launcher.machine, *(machine for machine, *what in self.done if isinstance(what[0], Assignment))]


@pytest.fixture
def lone(capsys):
    return lambda *arguments, **options: Lone(capsys, *arguments, **options)


def arrived(*machines: int) -> list[Event]:
    return [Event(machine, Arrived(f"host{machine}")) for machine in machines]


LOST = Event(1, Disconnected("was lost"))


def test_fewer_machines_than_the_maximum_start_after_settle_seconds(lone):
    first = lone("2:3")
    assert first.does(2, None, *arrived(2)) == [("jaxddp launch: machine 2 (host2) is connected",)]
    assert first.launcher.wake == 2 + 5
    first.does(7, None)
    assert first.start().processes == 4 and first.assigned() == [0, 2]


def test_too_few_machines_are_an_error_at_first_and_later_end_with_the_last_exit_code(lone):
    first = lone("2")
    with pytest.raises(Unreachable, match=re.escape("1 of at least 2 machines came in 30 s: 0 (")):
        first.does(30, None)
    assert first.launcher.is_over
    later = lone("2")
    later.does(2, *arrived(1), LOST)
    later.does(3, Event(0, KILLED))
    later.does(4, None)
    assert len(later.does(34, None)) == 1 and later.launcher.is_over and later.launcher.code == 1


def test_machines_that_cannot_share_the_batch_are_spares(lone):
    first, line = lone("1:4", sizes=(1, 2, 4)), "machine 2 waits as a spare: the job runs on 2 machines"
    first.does(2, *arrived(1, 2))
    assert first.does(7, None)[:3] == [(f"jaxddp launch: {line}",), (1, Notice(line)), (2, Notice(line))]
    assert first.assigned() == [0, 1]


def test_an_additional_machine_joins_after_join_after_seconds(lone):
    first = lone("1:2")
    first.does(5, None)
    first.start()
    first.does(6, *arrived(1))
    assert first.launcher.wake == 5 + 10
    said, *_, save = first.does(15, None)
    assert said[0].endswith("2 machines are connected; all processes save, and restart on these machines")
    assert save == ("save",) and first.launcher.wake is None
    # Machine 0 was killed by SIGTERM before it could save, which is no failure after a request to save.
    said, *_ = first.does(16, Event(0, KILLED))
    assert said == ("jaxddp launch: all processes restart with the new machines",)
    assert first.assigned() == [0, 1] and first.launcher.budget.used == 0


def test_the_first_failure_stops_the_other_machines_and_sets_the_exit_code(lone):
    first = lone("3")
    first.does(2, *arrived(1, 2))
    first.start()
    assert first.does(3, Event(1, Failure(9, "of another start", generation=7))) == []
    stop = Stop(0, saved=False)
    assert first.does(3, Event(1, Failure(2, "process 2: exit code 2"))) == [("stop", False), (1, stop), (2, stop)]
    assert first.does(4, Event(0, KILLED), Event(1, KILLED), Event(2, KILLED)) == []
    assert first.launcher.is_over and first.launcher.last_messages(None) == [JobEnded(2)]


def test_a_signal_to_a_machine_that_waits_for_another_ends_the_job(lone):
    running, failed = lone("2"), lone("2")
    running.does(2, *arrived(1), Event(0, DONE), signal.SIGINT)
    assert running.launcher.is_over and running.launcher.code == 130
    failed.does(2, *arrived(1), Event(0, KILLED), Event(0, Failure(**vars(KILLED))))
    failed.does(3, Event(1, End(130, "asked to stop", stop_requested=True)))
    assert failed.launcher.is_over and failed.launcher.code == 143


@pytest.mark.parametrize("nr", [0, 1])
def test_without_restarts_each_launcher_starts_its_own_processes_alone(nr, lone):
    alone = lone("2", 0, nr)
    alone.does(0, None)
    assert alone.start() == Assignment(0, nr * PROCESSES, 4, "host0:1", "name")
    alone.does(1, Event(nr, Failure(**vars(KILLED))), Event(nr, KILLED))
    assert alone.launcher.is_over and alone.launcher.code == 143


def agent_of_generation_4(lone) -> Lone:
    agent, assignment = lone("2", 3, 1), Assignment(4, 2, 4, "h:1", "n.4")
    assert agent.does(0, None)[1:] == [("reach", 30.0)] and agent.launcher.wake == 90
    agent.does(2, *arrived(0), Event(0, assignment))
    assert agent.start() == assignment and agent.launcher.wake is None
    return agent


def test_an_agent_follows_machine_0_and_sends_its_end_after_a_signal(lone):
    agent = agent_of_generation_4(lone)
    assert agent.does(3, Event(0, Stop(3, saved=True))) == []
    assert agent.does(3, Event(0, Stop(4, saved=True))) == [("stop", True)]
    agent.does(3, Event(0, JobEnded(7)))
    agent.does(4, Event(1, DONE))
    assert agent.launcher.is_over and agent.launcher.code == 7
    signalled = lone("2", 3, 1)
    signalled.does(2, None, *arrived(0), signal.SIGTERM)
    end = End(75, "asked to stop", stop_requested=True)
    assert signalled.launcher.is_over and signalled.launcher.last_messages(None) == [end]


def test_an_agent_reaches_machine_0_again_after_a_loss(lone):
    agent, lost = agent_of_generation_4(lone), Event(0, Disconnected("was lost"))
    assert agent.does(3, lost) == [("jaxddp launch: machine 0 was lost",), ("stop", False)]
    said, sent, reach = agent.does(4, Event(1, KILLED))
    assert "again, for up to 30 s" in said[0] and sent == (0, KILLED) and reach == ("reach", 30.0)
    assert "no answer" in agent.does(94, None)[0][0] and agent.launcher.is_over and agent.launcher.code == 143
