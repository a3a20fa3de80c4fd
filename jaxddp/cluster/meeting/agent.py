"""The state of a launcher on any machine except machine 0. It carries out the decisions of machine 0's launcher."""

from dataclasses import dataclass, replace

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
    JoinGeneration,
    LocalEnded,
    LocalFailed,
    RaiseError,
    Reach,
    Received,
    Say,
    Send,
    Signalled,
    StopProcesses,
    TimePassed,
    Unreached,
)
from jaxddp.cluster.options import Launch
from jaxddp.cluster.restarts import End
from jaxddp.core.errors import JaxddpError, Unreachable

_ADMISSION_SECONDS = 60.0
"""The seconds in which machine 0 must admit this machine after a connection is established."""


@dataclass(frozen=True)
class Agent:
    """The state of a launcher that follows machine 0, with the protocol `jaxddp.cluster.meeting.transitions.State`.

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
