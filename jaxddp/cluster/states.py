"""The launchers of a job: when and where processes start, and when the job ends.

The launcher of machine 0 is the `Coordinator`, which decides. The others are `Agent`s, which carry out its decisions. A
launcher that does not connect to other launchers is a coordinator, too. Both handle events sequentially, in the main
thread.
"""

import math
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from jaxddp.cluster.network import Arrived, Disconnected, Event, Network
from jaxddp.cluster.options import Launch
from jaxddp.cluster.worker import BAD_INPUT, PREEMPTED, STOPPED_BEFORE_TRAINING, End, Failure, WorkerGroup
from jaxddp.core.errors import JaxddpError, Unreachable, counted
from jaxddp.core.log import say
from jaxddp.job.messages import ExitCode, Message, Number, ProcessCount, Shown, address_of

LONGEST_DELAY = 60.0
LONG_RUN = 600.0
"""After an attempt that ran for at least this many seconds, the delays begin again at the shortest."""
_ADMISSION_SECONDS = 60.0
"""The seconds in which machine 0 must admit this machine after a connection is established."""


@dataclass(frozen=True)
class Assignment(Message):
    """The processes of a machine in a generation. A generation is one start of the whole job, numbered from 0.

    Attributes:
        first_rank: the rank of this machine's first process.
        processes: the number of processes on all machines.
        coordinator: the `host:port` of the coordinator, which differs between generations.
        run_id: the id of the generation. A late process of an earlier generation has another id, and cannot join.
    """

    generation: Number
    first_rank: Number
    processes: ProcessCount
    coordinator: str
    run_id: str


@dataclass(frozen=True)
class Stop(Message):
    """A request to end the processes of a machine, because the processes of another machine ended.

    If `saved`, the other machine's processes have saved, so these processes have time to save first.
    """

    generation: Number
    saved: bool


@dataclass(frozen=True)
class Notice(Message):
    """A line that every launcher prints."""

    line: Shown


@dataclass(frozen=True)
class JobEnded(Message):
    """The job has ended with this exit code."""

    code: ExitCode


@dataclass(kw_only=True, eq=False)
class Member(AbstractContextManager["Member"]):
    """What the launchers have in common. Times are those of the monotonic clock, in seconds.

    Attributes:
        events: the queue of events: `Event`s of other machines, and signals to this launcher.
        network: the connections to other launchers; None if the launchers do not meet.
        is_over: whether the job has ended for this machine.
        is_signalled: whether a signal ended this launcher while no process ran here.
        code: the exit code of the job, once it is over; before, the one with which this launcher would give up.
        local_start: the start that this machine has to make.
        listener: the listening socket of the coordinator, which process 0 of the job inherits.
        group: the running processes of this machine, if any.
    """

    options: Launch
    events: SimpleQueue[Any]
    network: Network | None
    clock: Callable[[], float] = time.monotonic
    is_over: bool = False
    is_signalled: bool = False
    code: int = 1
    local_start: Assignment | None = None
    listener: socket.socket | None = None
    group: WorkerGroup | None = None

    @property
    def machine(self) -> int:
        """The number of this machine."""
        return self.options.nr or 0

    @property
    def wake(self) -> float | None:
        """The time of the next step without another event; None if only other events are awaited."""
        raise NotImplementedError

    def last_messages(self, error: JaxddpError | None) -> list[Message]:
        """Return the messages to send before the connections are closed. `error` ends this launcher, if any."""
        raise NotImplementedError

    def next_start(self) -> Assignment | None:
        """Wait for the next start of the job, and return this machine's part; None if the job is over.

        Raises:
            Unreachable: the other machines do not connect in time.
            InputError: the options of the machines do not match, or an address is invalid.
        """
        self.handle(None)
        while self.local_start is None and not self.is_over:
            seconds = None if self.wake is None else max(0.0, self.wake - self.clock())
            try:
                self.handle(self.events.get(timeout=seconds))
            except Empty:
                self.handle(None)
        local_start, self.local_start = self.local_start, None
        return local_start

    def run(self, group: WorkerGroup) -> None:
        """Handle the events while the processes of this machine run, until all have ended."""
        self.group = group
        for event in group.watch(self.events):
            self.handle(Event(self.machine, event) if isinstance(event, Failure) else event)
        self.group = None
        self.handle(Event(self.machine, group.end()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Disconnect from the other launchers. `error` is the error that ends this launcher, if any."""
        if self.network is not None:
            self.network.close(*self.last_messages(error if isinstance(error, JaxddpError) else None))

    def handle(self, event: Event | signal.Signals | None) -> None:
        """Handle an event; a signal, which arrives while no process runs here; or None, after some time."""
        if self.is_over:
            return
        if isinstance(event, signal.Signals):
            say(f"jaxddp launch: {event.name}: no process runs here; this launcher ends")
            self.is_signalled = True
            self._end(128 + event if event == signal.SIGINT else PREEMPTED)
            return
        self._handle(event)
        if not self.is_over:
            self._proceed()

    def _handle(self, event: Event | None) -> None:
        raise NotImplementedError

    def _proceed(self) -> None:
        """Take the next step, if the last event permits it."""
        raise NotImplementedError

    def _end(self, code: int) -> None:
        self.is_over, self.code = True, code

    def _give_up(self, error: JaxddpError, *, has_started: bool) -> None:
        """End the job, because machines are not there. Without an earlier start, this is an error.

        Raises:
            JaxddpError: `error`.
        """
        self._end(self.code)
        if not has_started:
            raise error
        say(f"jaxddp launch: {error}")

    def _tell(self, machines: Iterable[int], message: Message) -> None:
        """Send a message to machines, or obey it on this one."""
        for machine in sorted(machines):
            if machine == self.machine:
                self._obey(message)
            elif self.network is not None:
                self.network.send(machine, message)

    def _obey(self, message: Message) -> None:
        match message:
            case Assignment():
                self.local_start = message
            case Stop(_, saved) if self.group is not None:
                self.group.stop_with_others(saved=saved)
            case Notice(line):
                say(f"jaxddp launch: {line}")


@dataclass
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

    def spend(self, seconds: float) -> bool:
        """Count a failure after this many seconds. Return whether the job may restart."""
        if self.used == self.most:
            return False
        self.used += 1
        self.in_a_row = 1 if seconds >= LONG_RUN else self.in_a_row + 1
        return True

    @property
    def delay(self) -> float:
        """Seconds before the next start: 1, 2, 4 and so on, at most 60."""
        # A float cannot hold a power of two beyond 2**1023.
        return min(2.0 ** min(self.in_a_row - 1, 10), LONGEST_DELAY) if self.in_a_row else 0.0


@dataclass
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
    members: Sequence[int] = ()
    ends: dict[int, End] = field(default_factory=dict)
    failure: End | None = None
    growing: bool = False

    @property
    def pending(self) -> set[int]:
        """The members whose processes have not ended."""
        return set(self.members) - self.ends.keys()

    def decide(self, budget: Budget, seconds: float, *, elastic: bool = False) -> int | str:
        """Return the exit code of the job, or the reason for a restart after this generation, which has ended.

        Args:
            budget: the restarts of the job, of which a restart after a failure spends one.
            seconds: how long the processes ran.
            elastic: whether the job continues when a machine other than machine 0 is asked to stop.
        """
        ends, failure = self.ends.values(), self.failure
        if all(end.code == 0 for end in ends):
            return 0
        leaving = [machine for machine, end in self.ends.items() if end.stop_requested]
        code = PREEMPTED if failure is None else failure.code
        if code == BAD_INPUT or any(end.user_exit for end in ends) or (leaving and (0 in leaving or not elastic)):
            return code
        if leaving:
            budget.in_a_row = 0
            return f"{_names(leaving)} left; the other machines continue"
        if self.growing and (failure is None or failure.code == STOPPED_BEFORE_TRAINING):
            budget.in_a_row = 0
            return f"{'' if failure else 'saved; '}all processes restart with the new machines"
        if failure is None or not budget.spend(seconds):
            return code
        return f"{failure.cause}; restart {budget.used} of {budget.most} in {budget.delay:g} s"


def _names(machines: Iterable[int]) -> str:
    return " and ".join(f"machine {machine}" for machine in sorted(machines))


@dataclass(kw_only=True, eq=False)
class Coordinator(Member):
    """The deciding launcher.

    Attributes:
        processes: the number of processes on each machine.
        counts: the numbers of machines that the job may have, in ascending order.
        name: the run id of the job.
        listen: a function that returns the coordinator's listening socket; None if process 0 runs on another machine.
        present: the host name of this machine and of each connected machine, by the machine's number.
        budget: the restarts of the job.
        started: the time at which the last generation started.
        opens: the earliest time of the next start, from which this launcher waits for machines.
        last_change: the time at which a machine last connected or disconnected.
        generation: the last generation, which runs while it has pending members.
        grow_at: when to check whether newly connected machines can take part; None if no check is planned.
    """

    processes: int
    counts: Sequence[int]
    name: str
    listen: Callable[[], socket.socket | None]
    started: float = 0.0
    generation: Generation = field(default_factory=Generation)
    grow_at: float | None = None

    def __post_init__(self) -> None:
        self.present, self.budget = {self.machine: socket.gethostname()}, Budget(self.options.restarts)
        self.opens = self.last_change = self.clock()

    @property
    def wake(self) -> float | None:
        if self.generation.pending:
            return self.grow_at
        if self._size == self.counts[-1]:
            return self.opens
        settled = self.last_change + self.options.settle if self._size else math.inf
        return min(max(self.opens, settled), self.opens + self.options.wait)

    def last_messages(self, error: JaxddpError | None) -> list[Message]:
        return [Notice(f"machine 0: {error}"), JobEnded(error.exit_code)] if error else [JobEnded(self.code)]

    @property
    def _size(self) -> int | None:
        """The number of machines of the next generation; None if too few machines are present."""
        return max((size for size in self.counts if size <= len(self.present)), default=None)

    def _handle(self, event: Event | None) -> None:
        match event:
            case Event(machine, Arrived(host)):
                say(f"jaxddp launch: machine {machine} ({host}) is connected")
                self.last_change, self.present[machine] = self.clock(), host
                join_at = max(self.last_change, self.started + self.options.join_after)
                self.grow_at = join_at if self.generation.pending else None
            case Event(machine, Disconnected(reason)):
                if self.present.pop(machine, None) is not None:
                    self.last_change = self.clock()
                self._record_end(machine, End(1, f"machine {machine} {reason}"))
            case Event(machine, Failure() as failure):
                if failure.generation == self.generation.number and machine in self.generation.pending:
                    self._record_failure(failure)
            case Event(machine, End() as end):
                self._handle_end(machine, end)

    def _proceed(self) -> None:
        if self.wake is None or self.clock() < self.wake:
            return
        if self.generation.pending:
            self._grow()
        elif self._size is not None:
            self._start()
        else:
            names = ", ".join(f"{machine} ({host})" for machine, host in sorted(self.present.items()))
            present, least = len(self.present), counted(self.counts[0], "machine")
            came = f"{present} of at least {least} came in {self.options.wait:g} s: {names}"
            line = f"--nodes {self.options.nodes}: {came}; start the others, or raise --wait"
            self._give_up(Unreachable(line), has_started=self.generation.number >= 0)

    def _start(self) -> None:
        """Start the next generation on the first machines, as many of them as can share the batch."""
        number, members = self.generation.number + 1, sorted(self.present)[: self._size]
        self.generation = Generation(number, members)
        self.started, self.grow_at = self.clock(), None
        if spare := self.present.keys() - set(members):
            waits = f"{_names(spare)} {'waits' if len(spare) == 1 else 'wait'} as a spare"
            self._tell(self.present, Notice(f"{waits}: the job runs on {counted(len(members), 'machine')}"))
        self.listener, meets = self.listen(), self.options.launchers_meet
        # Launchers of several machines that do not meet share only the address and the name of the job, and start the
        # job only once.
        address = self.options.coordinator or ""
        if self.listener is not None and (meets or not address):
            address = address_of(self.listener)
        run_id = f"{self.name}.{number}" if number or meets else self.name
        total = (len(members) if meets else self.options.machines.most) * self.processes
        for index, machine in enumerate(members):
            first_rank = (index if meets else machine) * self.processes
            self._tell([machine], Assignment(number, first_rank, total, address, run_id))

    def _record_end(self, machine: int, end: End) -> None:
        """Record that the processes of a machine have ended. If they failed, stop the other machines' processes."""
        if machine in self.generation.pending:
            self.generation.ends[machine] = end
            if end.code == PREEMPTED:
                self._tell(self.generation.pending, Stop(self.generation.number, saved=True))
            elif end.code:
                self._record_failure(end)
            if not self.generation.pending:
                self._conclude()

    def _record_failure(self, failure: End) -> None:
        if self.generation.failure is None:
            self.generation.failure = failure
            self._tell(self.generation.pending, Stop(self.generation.number, saved=False))

    def _handle_end(self, machine: int, end: End) -> None:
        elastic, generation = self.options.machines.elastic, self.generation
        if end.stop_requested and elastic:
            # The machine leaves the job, so the later end of its connection does not change the state.
            self.present.pop(machine, None)
        if machine in generation.pending and (end.stop_requested or end.generation == generation.number):
            self._record_end(machine, end)
        elif end.stop_requested and not elastic and not generation.pending:
            say(f"jaxddp launch: machine {machine}: {end.cause}")
            self._end(end.code)
        elif end.stop_requested and machine in generation.ends:
            # The processes of this machine have already ended. The signal takes effect when the processes of all other
            # machines have ended.
            generation.ends[machine] = replace(generation.ends[machine], stop_requested=True)

    def _grow(self) -> None:
        """Ask all processes to save and stop, if the next generation can have more machines than this generation."""
        self.grow_at, size, generation = None, self._size or 0, self.generation
        if generation.growing or generation.failure or generation.ends or size <= len(generation.members):
            return
        line = f"{size} machines are connected; all processes save, and restart on these machines"
        self._tell(self.present, Notice(line))
        generation.growing = True
        if self.group is not None:
            self.group.save()

    def _conclude(self) -> None:
        """Decide, after all processes of a generation have ended, whether the job ends or restarts after a delay."""
        now, failure = self.clock(), self.generation.failure
        verdict = self.generation.decide(self.budget, now - self.started, elastic=self.options.machines.elastic)
        if isinstance(verdict, int):
            self._end(verdict)
            return
        self._tell(self.present, Notice(verdict))
        self.opens = now + self.budget.delay
        # If too few machines connect again, the launcher ends with this exit code.
        self.code = PREEMPTED if failure is None else failure.code


@dataclass(kw_only=True, eq=False)
class Agent(Member):
    """A launcher that follows machine 0.

    Attributes:
        reach: tries to connect to machine 0 for a number of seconds.
        is_connected: whether this launcher is connected to machine 0.
        was_connected: whether this launcher is or was connected to machine 0.
        is_running: whether processes run on this machine.
        generation: the number of the last generation in which this machine took part.
        end: how the processes of that generation ended; None while the processes run, and before the first generation.
        job_code: the exit code of the job; None until machine 0 sends it.
        deadline: when to stop trying to connect to machine 0; None while this launcher does not try.
    """

    reach: Callable[[float], None]
    is_connected: bool = False
    was_connected: bool = False
    is_running: bool = False
    generation: int = 0
    end: End | None = None
    job_code: int | None = None
    deadline: float | None = None

    @property
    def wake(self) -> float | None:
        return self.deadline

    def last_messages(self, error: JaxddpError | None) -> list[Message]:
        if error is not None:
            return [End(error.exit_code, str(error), generation=self.generation)]
        if self.is_signalled:
            return [End(self.code, "asked to stop", stop_requested=True, generation=self.generation)]
        return []

    def _handle(self, event: Event | None) -> None:
        match event:
            case Event(_, Arrived()):
                self.is_connected, self.was_connected, self.deadline = True, True, None
            case Event(_, Disconnected(reason)):
                if self.job_code is None:
                    say(f"jaxddp launch: machine 0 {reason}")
                self._obey(Stop(self.generation, saved=False))
                self.is_connected = False
            case Event(_, JaxddpError() as error):
                self._give_up(error, has_started=self.was_connected)
            case Event(self.machine, Failure() as failure):
                self._tell([0], failure)
            case Event(self.machine, End() as end):
                self._tell([0], end)
                self.is_running, self.end, self.code = False, end, end.code or 1
            case Event(_, Notice() as notice):
                self._obey(notice)
            case Event(_, Stop(generation) as stop) if generation == self.generation:
                self._obey(stop)
            case Event(_, JobEnded(code)):
                self._obey(Stop(self.generation, saved=False))
                self.job_code = code
            case Event(_, Assignment() as assignment) if not self.is_running:
                self._obey(assignment)
                self.is_running, self.generation = True, assignment.generation
                self.end, self.code = None, 1
            case None if self.deadline is not None and self.clock() >= self.deadline:
                self._handle(Event(0, Unreachable(f"--coordinator {self.options.coordinator}: no answer")))

    def _proceed(self) -> None:
        """Decide the next action while no process runs: end, connect to machine 0, or wait for a message."""
        options, end = self.options, self.end
        if self.is_running or self.deadline is not None:
            return
        if self.job_code is not None:
            self._end(self.job_code)
        elif end is not None and end.stop_requested and (options.machines.elastic or not self.is_connected):
            self._end(end.code)
        elif end is not None and not self.is_connected and not options.restarts:
            self._end(self.code)
        elif not self.is_connected:
            again = " again" if self.was_connected else ""
            say(f"jaxddp launch: reaching machine 0 at {options.coordinator}{again}, for up to {options.wait:g} s")
            self.reach(options.wait)
            self.deadline = self.clock() + options.wait + _ADMISSION_SECONDS
