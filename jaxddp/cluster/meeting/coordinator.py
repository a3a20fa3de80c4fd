"""The state of the launcher that decides when and on which machines a generation starts, and whether another follows.

The launcher of machine 0 has this state, and so has every launcher that does not connect to other launchers.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxddp.cluster.meeting.generation import Generation
from jaxddp.cluster.meeting.launcher_messages import (
    Assignment,
    JobEnded,
    LauncherMessage,
    MachineEnded,
    MachineFailed,
    Notice,
    Stop,
    shortened,
)
from jaxddp.cluster.meeting.transitions import (
    Arrived,
    Disconnected,
    Effect,
    Event,
    LocalEnded,
    LocalFailed,
    RaiseError,
    Received,
    SaveProcesses,
    Say,
    Send,
    Signalled,
    StartGeneration,
    StopProcesses,
    TimePassed,
)
from jaxddp.cluster.options import Launch
from jaxddp.cluster.restarts import PREEMPTED, Budget, End, decide
from jaxddp.core.errors import JaxddpError, Unreachable
from jaxddp.core.wording import counted

Stage = Literal["gathering", "running", "delay", "over"]
"""The stages: wait for machines; run a generation; wait before the next generation; the job has ended."""


@dataclass(frozen=True)
class Coordinator:
    """The state of the deciding launcher, with the protocol `jaxddp.cluster.meeting.transitions.State`.

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
