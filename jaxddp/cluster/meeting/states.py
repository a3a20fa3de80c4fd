"""The states of launchers, as pure functions of events: when and where processes start, and when a job ends.

The launcher of machine 0 is the `Coordinator`, which decides. The others are `Agent`s, which carry out its decisions. A
launcher that does not connect to other launchers is a coordinator, too.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxddp.cluster.meeting.events import (
    Arrived,
    Assignment,
    Disconnected,
    Effect,
    Event,
    JobEnded,
    JoinGeneration,
    LauncherMessage,
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
    shortened,
)
from jaxddp.cluster.options import Launch
from jaxddp.cluster.worker_group import BAD_INPUT, PREEMPTED, STOPPED_BEFORE_TRAINING, End
from jaxddp.core.errors import JaxddpError, Unreachable
from jaxddp.core.wording import counted

LONGEST_DELAY = 60.0
LONG_RUN = 600.0
"""After an attempt that ran for at least this many seconds, the delays begin again at the shortest."""
Stage = Literal["gathering", "running", "delay", "over"]
"""The stages: wait for machines; run a generation; wait before the next generation; the job has ended."""
_ADMISSION_SECONDS = 60.0
"""The seconds in which machine 0 must admit this machine after a connection is established."""


@dataclass(frozen=True)
class Budget:
    """The restarts of a job.

    Attributes:
        most: the number of allowed restarts.
        used: the number of restarts so far.
        in_a_row: the number of consecutive failures without a long run between them.
    """

    most: int
    used: int = 0
    in_a_row: int = 0

    def after_failure(self, seconds: float) -> "Budget | None":
        """Return the budget after an attempt that failed after this many seconds; None if no restart is left."""
        if self.used == self.most:
            return None
        return replace(self, used=self.used + 1, in_a_row=1 if seconds >= LONG_RUN else self.in_a_row + 1)

    @property
    def delay(self) -> float:
        """Seconds before the next start: 1, 2, 4 and so on, at most 60."""
        # A float cannot hold a power of two beyond 2**1023.
        return min(2.0 ** min(self.in_a_row - 1, 10), LONGEST_DELAY) if self.in_a_row else 0.0


@dataclass(frozen=True)
class Restart:
    """A restart of the job after `budget.delay` seconds. `line` is the reason, which is printed."""

    budget: Budget
    line: str


def decide(
    ends: Mapping[int, End],
    failure: End | None,
    budget: Budget,
    seconds: float,
    *,
    elastic: bool = False,
    growing: bool = False,
) -> int | Restart:
    """Return the exit code of the job, or the restart that follows the start that ended.

    Args:
        ends: how the processes of each machine ended, by the machine's number.
        failure: the first failure on any machine; None if no process failed.
        seconds: how long the processes ran.
        elastic: whether the job continues when a machine other than machine 0 is asked to stop.
        growing: whether all processes were asked to save and stop, so that the next start has more machines.
    """
    if all(end.code == 0 for end in ends.values()):
        return 0
    leaving = [machine for machine, end in ends.items() if end.stop_requested]
    code = PREEMPTED if failure is None else failure.code
    if code == BAD_INPUT or any(end.user_exit for end in ends.values()) or (leaving and (0 in leaving or not elastic)):
        return code
    if leaving:
        names = " and ".join(f"machine {machine}" for machine in sorted(leaving))
        return Restart(replace(budget, in_a_row=0), f"{names} left; the other machines continue")
    if growing and (failure is None or failure.code == STOPPED_BEFORE_TRAINING):
        saved = "" if failure else "saved; "
        return Restart(replace(budget, in_a_row=0), f"{saved}all processes restart with the new machines")
    after = budget.after_failure(seconds)
    if failure is None or after is None:
        return code
    return Restart(after, f"{failure.cause}; restart {after.used} of {after.most} in {after.delay:g} s")


@dataclass(frozen=True)
class Generation:
    """The machines of a generation, and how their processes ended.

    Attributes:
        number: the number of the generation, from 0; -1 before the first generation.
        members: the machines of the generation.
        ends: how the processes of each member ended, for the members whose processes have ended.
        failure: the first failure of any member.
        growing: whether all processes were asked to save and stop, so that the next generation has more machines.
    """

    number: int = -1
    members: tuple[int, ...] = ()
    ends: Mapping[int, End] = field(default_factory=dict)
    failure: End | None = None
    growing: bool = False

    @property
    def pending(self) -> set[int]:
        """The members whose processes have not ended. It is empty unless the stage is "running"."""
        return set(self.members) - self.ends.keys()

    def with_end(self, machine: int, end: End) -> "Generation":
        """Return the generation after the processes of a machine have ended."""
        return replace(self, ends={**self.ends, machine: end})

    def following(self, members: tuple[int, ...]) -> "Generation":
        """Return the next generation, whose processes run on these machines."""
        return Generation(self.number + 1, members)


@dataclass(frozen=True)
class Coordinator:
    """The state of the deciding launcher, with the protocol `jaxddp.cluster.meeting.events.State`.

    Attributes:
        processes: the number of processes on each machine.
        sizes: the numbers of machines that the job may have, in ascending order.
        name: the run id of the job.
        present: the host name of this machine and of each connected machine, by the machine's number.
        budget: the restarts of the job.
        stage_start: the time at which the stage began.
        last_change: the time at which a machine last connected or disconnected.
        generation: the last generation.
        grow_at: when to check whether newly connected machines can take part; None if no check is planned.
    """

    options: Launch
    processes: int
    sizes: tuple[int, ...]
    name: str
    present: Mapping[int, str]
    budget: Budget
    stage_start: float
    last_change: float
    stage: Stage = "gathering"
    generation: Generation = field(default_factory=Generation)
    grow_at: float | None = None
    code: int = 1

    @classmethod
    def initial(cls, options: Launch, processes: int, sizes: Sequence[int], name: str, now: float) -> "Coordinator":
        """Return the initial state, in which only this machine is present."""
        present, budget = {options.nr or 0: socket.gethostname()}, Budget(options.restarts)
        allowed = tuple(sorted(sizes)) if options.launchers_meet else (1,)
        return cls(options, processes, allowed, name, present, budget, now, now)

    @property
    def own_machine(self) -> int:
        """The number of this machine."""
        return self.options.nr or 0

    @property
    def is_over(self) -> bool:
        return self.stage == "over"

    @property
    def wake(self) -> float | None:
        if self.stage == "gathering":
            deadline = self.stage_start + self.options.wait
            return deadline if self._size is None else min(self.last_change + self.options.settle, deadline)
        return self.stage_start + self.budget.delay if self.stage == "delay" else self.grow_at

    def after(self, event: Event, now: float) -> tuple["Coordinator", list[Effect]]:
        effects: list[Effect] = []
        if self.stage == "over":
            return self, effects
        state = self._handle(event, now, effects)
        if state.stage == "running" and not state.generation.pending:
            state = state._conclude(now, effects)
        if state.stage == "gathering" and state._size == state.sizes[-1]:
            state = state._start(now, effects)
        return state, effects

    def last_messages(self, error: JaxddpError | None) -> list[LauncherMessage]:
        if error is not None:
            return [Notice(shortened(f"machine 0: {error}")), JobEnded(error.exit_code)]
        return [JobEnded(self.code)]

    @property
    def _size(self) -> int | None:
        """The number of machines of the next generation; None if too few machines are present."""
        return max((size for size in self.sizes if size <= len(self.present)), default=None)

    def _handle(self, event: Event, now: float, effects: list[Effect]) -> "Coordinator":
        match event:
            case Arrived(machine, host):
                effects.append(Say(f"machine {machine} ({host}) is connected"))
                grow_at = max(now, self.stage_start + self.options.join_after) if self.generation.pending else None
                return replace(self, present={**self.present, machine: host}, last_change=now, grow_at=grow_at)
            case Disconnected(machine, reason):
                last_change = now if machine in self.present else self.last_change
                state = replace(self, present=_without(self.present, machine), last_change=last_change)
                return state._record_end(machine, End(1, f"machine {machine} {reason}"), effects)
            case Received(machine, MachineFailed(number, code, cause)):
                is_current = number == self.generation.number and machine in self.generation.pending
                return self._record_failure(End(code, cause), effects) if is_current else self
            case Received(machine, MachineEnded() as message):
                return self._handle_end(machine, message, effects)
            case LocalFailed(end):
                return self._record_failure(end, effects)
            case LocalEnded(end):
                return self._record_end(self.own_machine, end, effects)
            case Signalled(number):
                effects.append(Say(f"{number.name}: no process runs here; this launcher ends"))
                return replace(self, stage="over", code=128 + number)
            case TimePassed():
                return self._handle_time(now, effects)
            case _:
                return self

    def _handle_time(self, now: float, effects: list[Effect]) -> "Coordinator":
        if self.wake is None or now < self.wake:
            return self
        if self.stage == "gathering":
            return self._give_up(effects) if self._size is None else self._start(now, effects)
        if self.stage == "delay":
            return replace(self, stage="gathering", stage_start=now)
        return replace(self, grow_at=None)._grow(effects)

    def _start(self, now: float, effects: list[Effect]) -> "Coordinator":
        """Start the next generation on the first machines, as many of them as can share the batch."""
        members = tuple(sorted(self.present)[: self._size])
        generation = self.generation.following(members)
        state = replace(self, stage="running", stage_start=now, generation=generation, grow_at=None)
        if spare := sorted(self.present.keys() - set(members)):
            names = " and ".join(f"machine {machine}" for machine in spare)
            wait = "waits" if len(spare) == 1 else "wait"
            state._notify_all(f"{names} {wait} as a spare: the job runs on {counted(len(members), 'machine')}", effects)
        effects.append(StartGeneration(state._assignments()))
        return state

    def _assignments(self) -> dict[int, Assignment]:
        number, members, each = self.generation.number, self.generation.members, self.processes
        meets = self.options.launchers_meet
        # Launchers of several machines that do not meet share only the name of the job, and start the job only once.
        run_id = f"{self.name}.{number}" if number or meets else self.name
        if not meets:
            total = self.options.machines.most * each
            return {self.own_machine: Assignment(number, self.own_machine * each, total, "", run_id)}
        total = len(members) * each
        return {machine: Assignment(number, index * each, total, "", run_id) for index, machine in enumerate(members)}

    def _record_end(self, machine: int, end: End, effects: list[Effect]) -> "Coordinator":
        """Record that the processes of a machine have ended. If they failed, stop the other machines' processes."""
        if machine not in self.generation.pending:
            return self
        state = replace(self, generation=self.generation.with_end(machine, end))
        if end.code == PREEMPTED:
            state._stop(effects, saved=True)
            return state
        return state._record_failure(end, effects) if end.code else state

    def _record_failure(self, failure: End, effects: list[Effect]) -> "Coordinator":
        if self.generation.failure is not None:
            return self
        self._stop(effects, saved=False)
        return replace(self, generation=replace(self.generation, failure=failure))

    def _stop(self, effects: list[Effect], *, saved: bool) -> None:
        for machine in sorted(self.generation.pending):
            stop = Stop(self.generation.number, saved)
            effects.append(StopProcesses(saved) if machine == self.own_machine else Send(machine, stop))

    def _handle_end(self, machine: int, message: MachineEnded, effects: list[Effect]) -> "Coordinator":
        elastic, generation = self.options.machines.elastic, self.generation
        # If the machine leaves the job, the later end of its connection does not change the state.
        leaves = message.stop_requested and elastic
        state = replace(self, present=_without(self.present, machine)) if leaves else self
        if machine in generation.pending and (message.stop_requested or message.generation == generation.number):
            end = End(message.code, message.cause, message.stop_requested, message.user_exit)
            return state._record_end(machine, end, effects)
        if message.stop_requested and not elastic and not generation.pending:
            effects.append(Say(f"machine {machine}: {message.cause}"))
            return replace(state, stage="over", code=message.code)
        if message.stop_requested and machine in generation.ends:
            # The processes of this machine have already ended. The signal takes effect when the processes of all other
            # machines have ended.
            end = replace(generation.ends[machine], stop_requested=True)
            return replace(state, generation=generation.with_end(machine, end))
        return state

    def _grow(self, effects: list[Effect]) -> "Coordinator":
        """Ask all processes to save and stop, if the next generation can have more machines than this generation."""
        size, generation = self._size, self.generation
        if generation.growing or generation.failure or generation.ends:
            return self
        if size is None or size <= len(generation.members):
            return self
        self._notify_all(f"{size} machines are connected; all processes save, and restart on these machines", effects)
        effects.append(SaveProcesses())
        return replace(self, generation=replace(generation, growing=True))

    def _conclude(self, now: float, effects: list[Effect]) -> "Coordinator":
        """Decide, after all processes of a generation have ended, whether the job ends or restarts after a delay."""
        ended, ran = self.generation, now - self.stage_start
        elastic = self.options.machines.elastic
        verdict = decide(ended.ends, ended.failure, self.budget, ran, elastic=elastic, growing=ended.growing)
        if isinstance(verdict, int):
            return replace(self, stage="over", code=verdict)
        self._notify_all(verdict.line, effects)
        # If too few machines connect again, the launcher ends with this exit code.
        code = PREEMPTED if ended.failure is None else ended.failure.code
        return replace(self, stage="delay", stage_start=now, budget=verdict.budget, code=code)

    def _give_up(self, effects: list[Effect]) -> "Coordinator":
        names = ", ".join(f"{machine} ({host})" for machine, host in sorted(self.present.items()))
        line = (
            f"{len(self.present)} of at least {counted(self.sizes[0], 'machine')} came in {self.options.wait:g} "
            f"s: {names}; start the others, or raise --wait"
        )
        never_started = self.generation.number < 0
        effects.append(RaiseError(Unreachable(f"--nodes {self.options.nodes}: {line}")) if never_started else Say(line))
        return replace(self, stage="over")

    def _notify_all(self, line: str, effects: list[Effect]) -> None:
        effects.append(Say(line))
        others = sorted(self.present.keys() - {self.own_machine})
        effects += [Send(machine, Notice(shortened(line))) for machine in others]


def _without(present: Mapping[int, str], machine: int) -> dict[int, str]:
    return {other: host for other, host in present.items() if other != machine}


@dataclass(frozen=True)
class Agent:
    """The state of a launcher that follows machine 0, with the protocol `jaxddp.cluster.meeting.events.State`.

    Attributes:
        is_connected: whether this launcher is connected to machine 0.
        was_connected: whether this launcher is or was connected to machine 0.
        deadline: when to stop trying to connect to machine 0; None while this launcher does not try.
        is_running: whether processes run on this machine.
        generation: the number of the last generation in which this machine took part.
        end: how the processes of that generation ended; None while the processes run, and before the first generation.
        stop_requested: whether this launcher received a signal to end.
        job_code: the exit code of the job; None until machine 0 sends it.
    """

    options: Launch
    is_connected: bool = False
    was_connected: bool = False
    deadline: float | None = None
    is_running: bool = False
    generation: int = 0
    end: End | None = None
    stop_requested: bool = False
    job_code: int | None = None
    is_over: bool = False
    code: int = 1

    @property
    def wake(self) -> float | None:
        return self.deadline

    def after(self, event: Event, now: float) -> tuple["Agent", list[Effect]]:
        effects: list[Effect] = []
        if self.is_over:
            return self, effects
        state = self._handle(event, now, effects)
        if not state.is_over and not state.is_running and state.deadline is None:
            state = state._decide_when_idle(now, effects)
        return state, effects

    def last_messages(self, error: JaxddpError | None) -> list[LauncherMessage]:
        if error is not None:
            return [
                MachineEnded(
                    self.generation, error.exit_code, shortened(str(error)), stop_requested=False, user_exit=False
                )
            ]
        if self.stop_requested:
            return [MachineEnded(self.generation, self.code, "asked to stop", stop_requested=True, user_exit=False)]
        return []

    def _handle(self, event: Event, now: float, effects: list[Effect]) -> "Agent":
        match event:
            case Arrived():
                return replace(self, is_connected=True, was_connected=True, deadline=None)
            case Disconnected(_, reason):
                if self.job_code is None:
                    effects.append(Say(f"machine 0 {reason}"))
                effects.append(StopProcesses(saved=False))
                return replace(self, is_connected=False)
            case Unreached(error):
                return self._give_up(error, effects)
            case Received(_, message):
                return self._handle_message(message, effects)
            case LocalFailed(end):
                effects.append(Send(0, MachineFailed(self.generation, end.code, shortened(end.cause))))
                return self
            case LocalEnded(end):
                ended = MachineEnded(self.generation, end.code, shortened(end.cause), end.stop_requested, end.user_exit)
                effects.append(Send(0, ended))
                return replace(self, is_running=False, end=end)
            case Signalled(number):
                effects.append(Say(f"{number.name}: no process runs here; this launcher ends"))
                return replace(self, is_over=True, code=128 + number, stop_requested=True)
            case TimePassed():
                if self.deadline is None or now < self.deadline:
                    return self
                return self._give_up(Unreachable(f"--coordinator {self.options.coordinator}: no answer"), effects)

    def _handle_message(self, message: object, effects: list[Effect]) -> "Agent":
        match message:
            case Notice(line):
                effects.append(Say(line))
            case Stop(generation, saved) if generation == self.generation:
                effects.append(StopProcesses(saved))
            case JobEnded(code):
                effects.append(StopProcesses(saved=False))
                return replace(self, job_code=code)
            case Assignment() if not self.is_running:
                effects.append(JoinGeneration(message))
                return replace(self, is_running=True, generation=message.generation, end=None)
            case _:
                pass
        return self

    def _decide_when_idle(self, now: float, effects: list[Effect]) -> "Agent":
        """Decide the next action while no process runs: end, connect to machine 0, or wait for a message."""
        if self.job_code is not None:
            return replace(self, is_over=True, code=self.job_code)
        options, end = self.options, self.end
        if end is not None:
            if end.stop_requested and (options.machines.elastic or not self.is_connected):
                return replace(self, is_over=True, code=end.code)
            if not self.is_connected and not options.restarts:
                return replace(self, is_over=True, code=end.code or 1)
        if self.is_connected:
            return self
        again = " again" if self.was_connected else ""
        line = f"reaching machine 0 at {options.coordinator}{again}, for up to {options.wait:g} s"
        effects += [Say(line), Reach(options.wait)]
        return replace(self, deadline=now + options.wait + _ADMISSION_SECONDS)

    def _give_up(self, error: JaxddpError, effects: list[Effect]) -> "Agent":
        effects.append(Say(str(error)) if self.was_connected else RaiseError(error))
        return replace(self, is_over=True, code=self.end.code if self.end and self.end.code else 1)
