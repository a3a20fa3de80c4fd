"""The states of the launchers of a job, as pure functions of events. Machines, networks and clocks are simulated.

The machines of `World` fail, vanish, lose their connections and return in any order. A generation starts only after
the previous generation has ended, and all launchers end with one exit code.
"""

import signal
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxddp.cluster.meeting.events import (
    Arrived,
    Assignment,
    Disconnected,
    Effect,
    Event,
    JobEnded,
    JoinGeneration,
    LocalEnded,
    LocalFailed,
    MachineEnded,
    MachineFailed,
    Notice,
    RaiseError,
    Reach,
    Received,
    SaveProcesses,
    Say,
    Send,
    Signalled,
    StartGeneration,
    Stop,
    StopProcesses,
    TimePassed,
    Unreached,
)
from jaxddp.cluster.meeting.states import Agent, Coordinator
from jaxddp.cluster.options import Launch
from jaxddp.cluster.worker_group import End
from jaxddp.core.errors import Unreachable

PROCESSES = 2
DONE, SAVED, KILLED = End(0, "done"), End(75, "asked to stop"), End(143, "process 1: killed by SIGTERM")


def options(nodes: str, restarts: int, nr: int = 0) -> Launch:
    return Launch(
        *(PROCESSES, None, nodes, nr, "host0:1", restarts),
        wait=30.0,
        settle=5.0,
        join_after=10.0,
    )


class World:
    """A simulation of machines, each with a launcher and processes, and of the network between them."""

    def __init__(self, nodes: str, restarts: int):
        self.nodes, self.restarts, self.now = nodes, restarts, 0.0
        launch = options(nodes, restarts)
        self.sizes = range(launch.machines.least, launch.machines.most + 1)
        self.most = launch.machines.most
        self.coordinator = Coordinator.initial(launch, PROCESSES, self.sizes, "name", self.now)
        self.agents = {machine: self.agent(machine) for machine in range(1, self.most)}
        self.reaching, self.connected = set[int](), set[int]()
        self.queues = {machine: deque[Event]() for machine in range(self.most)}
        # The generation that runs on each machine, and its end if the launcher has stopped it.
        self.running, self.stopped = dict[int, int](), dict[int, End]()
        self.run_ids, self.failures, self.error = list[str](), 0, False
        for machine in range(self.most):
            self.handle(machine, TimePassed())

    def agent(self, machine: int) -> Agent:
        return Agent(options(self.nodes, self.restarts, machine))

    def handle(self, machine: int, event: Event) -> None:
        before = self.state(machine)
        if before is None or before.is_over:
            return
        state, effects = before.after(event, self.now)
        assert repr((state, effects)) == repr(before.after(event, self.now))
        if machine:
            self.agents[machine] = state
        else:
            self.coordinator = state
        for effect in effects:
            self.perform(machine, effect)
        # A launcher that waits without running processes is woken by a message or by its clock.
        is_idle = machine not in self.running and not state.is_over
        if is_idle and (machine == 0 and not self.awaited()):
            assert state.wake is not None
        if is_idle and machine and not state.is_connected:
            assert state.wake is not None
        if state.is_over:
            self.close(machine)

    def state(self, machine: int) -> Coordinator | Agent | None:
        return self.agents.get(machine) if machine else self.coordinator

    def awaited(self) -> set[int]:
        """Return the machines whose end the coordinator has not received."""
        return set(self.coordinator.generation.members) - self.coordinator.generation.ends.keys()

    def perform(self, machine: int, effect: Effect) -> None:
        match effect:
            case Send(other, message):
                self.deliver_later(machine, other, Received(machine, message))
            case Reach():
                self.reaching.add(machine)
            case StartGeneration(assignments):
                self.check_start(assignments)
                for other, assignment in assignments.items():
                    self.deliver_later(0, other, Received(0, assignment))
                self.begin(0, assignments[0].generation)
            case JoinGeneration(assignment):
                self.begin(machine, assignment.generation)
            case StopProcesses(saved):
                self.stop(machine, saved)
            case SaveProcesses():
                self.stop(machine, True)
            case RaiseError():
                self.error = True
            case Say():
                pass

    def check_start(self, assignments: dict[int, Assignment]) -> None:
        # The previous generation has ended on every machine that is still connected.
        assert not (self.running.keys() & (self.connected | {0}))
        assert len(assignments) in self.sizes and next(iter(assignments)) == 0
        assert assignments.keys() <= self.coordinator.present.keys()
        ranks = [assignment.first_rank for assignment in assignments.values()]
        assert ranks == list(range(0, len(ranks) * PROCESSES, PROCESSES))
        assert {assignment.processes for assignment in assignments.values()} == {len(ranks) * PROCESSES}
        (run_id,) = {assignment.run_id for assignment in assignments.values()}
        assert run_id not in self.run_ids
        self.run_ids.append(run_id)
        assert self.coordinator.budget.used <= self.restarts

    def deliver_later(self, sender: int, receiver: int, event: Event) -> None:
        if receiver != sender and (sender or receiver) in self.connected:
            self.queues[receiver].append(event)

    def begin(self, machine: int, generation: int) -> None:
        assert machine not in self.running
        self.running[machine] = generation
        self.stopped.pop(machine, None)

    def stop(self, machine: int, saved: bool) -> None:
        if machine in self.running:
            self.stopped.setdefault(machine, SAVED if saved else KILLED)

    def close(self, machine: int) -> None:
        """End a launcher after its last messages."""
        last = self.state(machine).last_messages(None)
        for other in list(self.connected) if machine == 0 else [machine] * (machine in self.connected):
            receiver = 0 if machine else other
            self.queues[receiver] += [Received(machine, message) for message in last]
            self.queues[receiver].append(Disconnected(machine, "left"))
            self.connected.discard(other)
        self.running.pop(machine, None)
        self.reaching.discard(machine)

    # --- The possible events ---

    def deliver(self, machine: int, _: End) -> None:
        if self.queues[machine]:
            self.handle(machine, self.queues[machine].popleft())

    def end(self, machine: int, end: End) -> None:
        """End the processes of a machine."""
        if machine in self.running:
            if end.code not in (0, 75) and not end.stop_requested:
                self.handle(machine, LocalFailed(end))
            self.running.pop(machine, None)
            self.handle(machine, LocalEnded(end))

    def connect(self, machine: int, _: End) -> None:
        if machine in self.reaching:
            self.reaching.discard(machine)
            if self.coordinator.is_over:
                self.queues[machine].append(Unreached(Unreachable("nobody is there")))
            else:
                self.connected.add(machine)
                self.queues[machine].append(Arrived(0, "host0"))
                self.queues[0].append(Arrived(machine, f"host{machine}"))

    def cut(self, machine: int, _: End) -> None:
        """Break a connection."""
        if machine in self.connected:
            self.connected.discard(machine)
            self.queues[machine].append(Disconnected(0, "was lost"))
            self.queues[0].append(Disconnected(machine, "was lost"))

    def vanish(self, machine: int, _: End) -> None:
        """Remove a machine other than 0, and add it again as a new one."""
        if machine:
            if machine in self.connected:
                self.connected.discard(machine)
                self.queues[0].append(Disconnected(machine, "was lost"))
            self.reaching.discard(machine)
            self.running.pop(machine, None)
            self.queues[machine].clear()
            self.agents[machine] = self.agent(machine)
            self.handle(machine, TimePassed())

    def signal(self, machine: int, _: End) -> None:
        if machine in self.running:
            self.end(machine, End(75, "asked to stop", stop_requested=True))
        else:
            self.handle(machine, Signalled(signal.SIGTERM))

    def wait(self, machine: int, _: End) -> None:
        """Let time pass until a launcher wakes."""
        state = self.state(machine)
        if state is not None and not state.is_over and state.wake is not None:
            self.now = max(self.now, state.wake)
            self.handle(machine, TimePassed())

    def start(self) -> None:
        """Connect all machines, which starts the processes on them."""
        for machine in sorted(self.reaching):
            self.connect(machine, DONE)
        while busy := [machine for machine in range(self.most) if self.queues[machine]]:
            self.deliver(busy[0], DONE)

    def settle(self) -> int:
        """Continue without further failures until all launchers have ended; return the number of events."""
        for number in range(3000):
            machines = range(self.most)
            if all(self.state(machine).is_over for machine in machines):
                return number
            busy = next((machine for machine in machines if self.queues[machine]), None)
            if busy is not None:
                self.deliver(busy, DONE)
            elif self.reaching:
                self.connect(min(self.reaching), DONE)
            elif self.running:
                machine = min(self.running)
                self.end(machine, self.stopped.get(machine, DONE))
            else:
                wakes = {m: s.wake for m in machines if not (s := self.state(m)).is_over and s.wake is not None}
                assert wakes, "all wait for each other"
                self.wait(min(wakes, key=wakes.__getitem__), DONE)
        raise AssertionError("no end")


ACTIONS: list[Callable[[World, int, End], None]] = [
    *(World.deliver, World.deliver, World.deliver, World.end, World.connect, World.connect, World.wait),
    *(World.cut, World.vanish, World.signal),
]
ENDS = [DONE, SAVED, KILLED, End(137, "process 0: killed by SIGKILL"), End(2, "a mistake"), End(1, "x", user_exit=True)]


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
    for action, machine, end in actions:
        action(world, machine % world.most, end)
    world.settle()
    informed = [agent for agent in world.agents.values() if agent.job_code is not None and not agent.stop_requested]
    assert {agent.code for agent in informed} <= {world.coordinator.code}


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["2", "3", "1:3"]), st.integers(1, 3))
def test_a_job_without_failures_starts_once_and_ends_with_exit_code_0(nodes, restarts):
    world = World(nodes, restarts)
    world.settle()
    assert world.run_ids == ["name.0"]
    assert {world.state(machine).code for machine in range(world.most)} == {0}


# --- Chosen sequences of events ---


def states(state, *events: tuple[float, Event]) -> tuple[Coordinator | Agent, list[Effect]]:
    """Return the state after events at their times, and the effects of the last event."""
    effects: list[Effect] = []
    for now, event in events:
        state, effects = state.after(event, now)
    return state, effects


def coordinator(nodes: str, restarts: int = 3, sizes: tuple[int, ...] = ()) -> Coordinator:
    launch = options(nodes, restarts)
    allowed = sizes or range(launch.machines.least, launch.machines.most + 1)
    return Coordinator.initial(launch, PROCESSES, allowed, "n", 0.0)


def arrivals(*machines: int) -> list[tuple[float, Event]]:
    return [(float(machine), Arrived(machine, f"host{machine}")) for machine in machines]


def test_fewer_machines_than_the_maximum_start_after_settle_seconds():
    state, effects = states(coordinator("2:3"), (0, TimePassed()), *arrivals(2))
    assert state.wake == 2 + 5 and effects == [Say("machine 2 (host2) is connected")]
    state, effects = states(state, (7.0, TimePassed()))
    (start,) = effects
    assert isinstance(start, StartGeneration) and [*start.assignments] == [0, 2]


def test_too_few_machines_are_an_error_at_first_and_later_end_with_the_last_exit_code():
    first = coordinator("2")
    state, (fail,) = states(first, (30.0, TimePassed()))
    assert isinstance(fail, RaiseError) and "1 of at least 2 machines came in 30 s: 0 (" in str(fail.error)
    assert state.is_over
    lost = [*arrivals(1), (2.0, Disconnected(1, "was lost")), (3.0, LocalEnded(KILLED)), (4.0, TimePassed())]
    state, effects = states(first, *lost, (34.0, TimePassed()))
    assert state.is_over and state.code == 1 and isinstance(effects[0], Say)


def test_machines_that_cannot_share_the_batch_are_spares():
    events = [*arrivals(1, 2), (7.0, TimePassed())]
    _, effects = states(coordinator("1:4", sizes=(1, 2, 4)), *events)
    line = "machine 2 waits as a spare: the job runs on 2 machines"
    assert effects[:3] == [Say(line), Send(1, Notice(line)), Send(2, Notice(line))]
    assert isinstance(effects[3], StartGeneration) and [*effects[3].assignments] == [0, 1]


def test_an_additional_machine_joins_after_join_after_seconds():
    state, _ = states(coordinator("1:2"), (5.0, TimePassed()), *[(6.0, Arrived(1, "host1"))])
    assert state.wake == 5 + 10
    state, effects = states(state, (15.0, TimePassed()))
    assert effects[0] == Say("2 machines are connected; all processes save, and restart on these machines")
    assert effects[-1] == SaveProcesses() and state.wake is None
    # Machine 0 was killed by SIGTERM before it could save, which is no failure after a request to save.
    state, effects = states(state, (16.0, LocalEnded(KILLED)))
    assert isinstance(effects[0], Say) and effects[0].line == "saved; all processes restart with the new machines"[7:]
    state, (start,) = states(state, (16.0, TimePassed()))
    assert isinstance(start, StartGeneration) and [*start.assignments] == [0, 1] and state.budget.used == 0


def test_the_first_failure_stops_the_other_machines_and_sets_the_exit_code():
    state, _ = states(coordinator("3"), *arrivals(1, 2))
    late = MachineFailed(7, 9, "of another start")
    assert states(state, (3.0, Received(1, late))) == (state, [])
    state, effects = states(state, (3.0, Received(1, MachineFailed(0, 2, "process 2: exit code 2"))))
    stop = Stop(0, saved=False)
    assert effects == [StopProcesses(saved=False), Send(1, stop), Send(2, stop)]
    ends = [Received(m, MachineEnded(0, 143, "SIGTERM", stop_requested=False, user_exit=False)) for m in (1, 2)]
    state, effects = states(state, (4.0, LocalEnded(KILLED)), *[(5.0, end) for end in ends])
    assert state.is_over and (state.code, effects) == (2, [])
    assert state.last_messages(None) == [JobEnded(2)]


def test_a_signal_to_a_machine_that_waits_for_another_ends_the_job():
    running, _ = states(coordinator("2"), *arrivals(1), (2.0, LocalEnded(DONE)))
    state, _ = states(running, (3.0, Signalled(signal.SIGINT)))
    assert state.is_over and state.code == 130
    failed, _ = states(coordinator("2"), *arrivals(1), (2.0, LocalEnded(KILLED)), (2.0, LocalFailed(KILLED)))
    asked = Received(1, MachineEnded(0, 130, "asked to stop", stop_requested=True, user_exit=False))
    state, _ = states(failed, (3.0, asked))
    assert state.is_over and state.code == 143


@pytest.mark.parametrize("nr", [0, 1])
def test_without_restarts_each_launcher_starts_its_own_processes_alone(nr):
    alone = Coordinator.initial(options("2", 0, nr), PROCESSES, [2], "name", 0.0)
    state, (start,) = states(alone, (0, TimePassed()))
    assert isinstance(start, StartGeneration) and start.assignments == {
        nr: Assignment(0, nr * PROCESSES, 4, "", "name")
    }
    state, _ = states(state, (1.0, LocalFailed(KILLED)), (1.0, LocalEnded(KILLED)))
    assert state.is_over and state.code == 143


def test_an_agent_follows_machine_0():
    first = Agent(options("2", 3, 1))
    state, effects = states(first, (0, TimePassed()))
    assert isinstance(effects[0], Say) and effects[1:] == [Reach(30.0)] and state.wake == 90
    assignment = Assignment(4, 2, 4, "h:1", "n.4")
    state, effects = states(state, (1, Arrived(0, "h")), (2, Received(0, assignment)))
    assert effects == [JoinGeneration(assignment)] and state.wake is None
    assert states(state, (3, Received(0, Stop(3, saved=True))))[1] == []
    assert states(state, (3, Received(0, Stop(4, saved=True))))[1] == [StopProcesses(saved=True)]
    lost, effects = states(state, (3, Disconnected(0, "was lost")))
    assert effects == [Say("machine 0 was lost"), StopProcesses(saved=False)]
    lost, effects = states(lost, (4, LocalEnded(KILLED)))
    assert isinstance(effects[1], Say) and "again, for up to 30 s" in effects[1].line and effects[2] == Reach(30.0)
    over, effects = states(lost, (94, TimePassed()))
    assert over.is_over and over.code == 143 and isinstance(effects[0], Say)
    over, _ = states(state, (3, Received(0, JobEnded(7))), (4, LocalEnded(DONE)))
    assert over.is_over and over.code == 7


def test_an_agent_that_never_reached_machine_0_fails():
    error = Unreachable("nobody is there")
    state, effects = states(Agent(options("2", 3, 1)), (0, TimePassed()), (5, Unreached(error)))
    assert state.is_over and effects == [RaiseError(error)]


def test_an_agent_that_is_signalled_sends_its_end():
    idle, _ = states(Agent(options("2", 3, 1)), (0, TimePassed()), (1, Arrived(0, "h")))
    state, _ = states(idle, (2, Signalled(signal.SIGTERM)))
    assert state.is_over and state.last_messages(None) == [
        MachineEnded(0, 143, "asked to stop", stop_requested=True, user_exit=False)
    ]
