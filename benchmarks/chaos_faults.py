"""What `benchmarks/chaos.py` does to a job, and what a job promises of each: a line and an end in time, or to go on."""

import contextlib
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos_jobs import HEARTBEAT, STALL, START_TIMEOUT, Job, send
from chaos_places import Cable, Store, fill
from chaos_workdir import covered, moved, read_only, removed, replaced, to_workdir

GRACE = 2.0
SLACK = 15.0
"""Seconds that a busy machine may add: the launcher's and the processes' own grace, and what they still write."""
FIXED = ("start", "compile", "step", "save", "evaluation", "end", "restart", "restart, step")
JOINED = tuple(moment for moment in FIXED if moment not in ("start", "restart"))
"""All moments at which the processes of a job have met, or nearly so."""

LOST = "(of \\d )?(was lost|gave no sign of life for|did not|has not|no answer|not come|could not reach|ended: )"


@dataclass(frozen=True)
class Promise:
    """How a job ends after a fault: the codes that its launchers may have, words that are said, the longest time."""

    codes: frozenset[int]
    words: str = ""
    seconds: float = HEARTBEAT + SLACK

    def broken_by(self, codes: list[int | None], said: str) -> str:
        """What of it was not kept; "" where all was."""
        unexpected = [code for code in codes if code not in self.codes]
        if unexpected:
            return f"exit codes {codes}, expected each among {sorted(self.codes)}"
        # A launcher that was killed itself has a negative code.
        failed = any(code is not None and code > 0 for code in codes)
        if self.words and failed and not re.search(self.words, said):
            return f"nothing said like {self.words!r}"
        return ""


@dataclass
class Struck:
    """What a fault strikes: the job, the place it runs in, and which process or host."""

    job: Job
    chance: random.Random
    workdir: Path
    cable: Cable | None = None
    store: Store | None = None
    disk: Path | None = None

    def any_rank(self) -> int:
        return self.chance.randrange(len(self.job.hosts) * self.job.processes)

    def any_host(self) -> int:
        return self.chance.randrange(len(self.job.hosts))


Strike = Callable[[Struck], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """A fault by its name.

    Attributes:
        strike: makes it; what it undoes at its end is undone once the job is over, or, where it `passes`, before.
        places: the topologies in which it can be made.
        passes: it is over by itself, and the job is to go on.
        options: of the launchers, beside their own.
    """

    strike: Strike
    promise: Promise
    places: tuple[str, ...] = ("two", "hosts")
    moments: tuple[str, ...] = FIXED
    passes: bool = False
    options: tuple[str, ...] = ()


GOES_ON = Promise(frozenset({0}), seconds=120)


def _codes(*codes: int) -> frozenset[int]:
    # Where the fault comes too late, or before the job could be hurt by it, the run is done.
    return frozenset({0, *codes})


@contextmanager
def kill_process(struck: Struck) -> Iterator[None]:
    send(struck.job.worker(struck.any_rank()), signal.SIGKILL)
    yield


@contextmanager
def kill_keeper(struck: Struck) -> Iterator[None]:
    send(struck.job.keeper(1), signal.SIGKILL)
    yield


@contextmanager
def kill_launcher(struck: Struck) -> Iterator[None]:
    send(struck.job.launchers[struck.any_host()].pid, signal.SIGKILL)
    yield


@contextmanager
def start_launcher_again(struck: Struck) -> Iterator[None]:
    host = struck.any_host()
    send(struck.job.launchers[host].pid, signal.SIGKILL)
    time.sleep(struck.chance.uniform(0, AWAY))
    struck.job.launch_again(host)
    yield


@contextmanager
def kill_host(struck: Struck, host: int | None = None) -> Iterator[None]:
    """No connection is closed: the machine is gone from one moment to the next."""
    host, cable = struck.any_host() if host is None else host, struck.cable
    assert cable is not None
    cable.pull(host)
    try:
        for pid in struck.job.of_host(host):
            send(pid, signal.SIGKILL)
        yield
    finally:
        cable.plug(host)


@contextmanager
def start_host_again(struck: Struck) -> Iterator[None]:
    host = struck.any_host()
    with kill_host(struck, host):
        time.sleep(struck.chance.uniform(0, AWAY))
    struck.job.launch_again(host)
    yield


@contextmanager
def stop_process(struck: Struck) -> Iterator[None]:
    send(struck.job.worker(struck.any_rank()), signal.SIGSTOP)
    yield


@contextmanager
def pull_cable(struck: Struck) -> Iterator[None]:
    host, cable = struck.any_host(), struck.cable
    assert cable is not None
    cable.pull(host)
    try:
        yield
    finally:
        cable.plug(host)


@contextmanager
def fill_disk(struck: Struck) -> Iterator[None]:
    assert struck.disk is not None
    filler = fill(struck.disk)
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


def asked(number: signal.Signals, whom: str) -> Strike:
    """Ask a process or a launcher to stop."""

    @contextmanager
    def strike(struck: Struck) -> Iterator[None]:
        pid = struck.job.worker(struck.any_rank()) if whom == "process" else struck.job.launchers[struck.any_host()].pid
        send(pid, number)
        yield

    return strike


def paused(whom: str, longest: float) -> Strike:
    """Stop a process or a launcher, and let it go on."""

    @contextmanager
    def strike(struck: Struck) -> Iterator[None]:
        pid = struck.job.worker(struck.any_rank()) if whom == "process" else struck.job.launchers[struck.any_host()].pid
        send(pid, signal.SIGSTOP)
        try:
            time.sleep(struck.chance.uniform(0.2, longest))
        finally:
            send(pid, signal.SIGCONT)
        yield

    return strike


@contextmanager
def loose_cable(struck: Struck) -> Iterator[None]:
    with pull_cable(struck):
        time.sleep(struck.chance.uniform(0.1, HEARTBEAT / 3))
    yield


@contextmanager
def stop_store(struck: Struck) -> Iterator[None]:
    assert struck.store is not None
    struck.store.stop()
    with contextlib.ExitStack() as stack:
        stack.callback(struck.store.start)
        time.sleep(struck.chance.uniform(0.5, 4))
    yield


@contextmanager
def silence_store(struck: Struck) -> Iterator[None]:
    assert struck.store is not None
    struck.store.answers.clear()
    try:
        yield
    finally:
        struck.store.answers.set()


AWAY = 3.0
"""Seconds, at most, after which what was killed is started again."""
ONCE = tuple(moment for moment in FIXED if not moment.startswith("restart"))
RESTARTS = ("--restarts", "3")
KILLED, ASKED = 128 + signal.SIGKILL, 75
BEFORE_IT_LISTENS = 128 + signal.SIGTERM, 128 + signal.SIGINT
MEETING = START_TIMEOUT + SLACK
STOPPED = f"process \\d {LOST}|no answer in \\d+ s; is it process \\d"
GONE = Promise(_codes(2), "was removed, moved or replaced|cannot be written")

FAULTS: dict[str, Fault] = {
    "process killed": Fault(kill_process, Promise(_codes(KILLED, 1), r"process \d: killed by SIGKILL", MEETING)),
    "keeper killed": Fault(kill_keeper, Promise(_codes(134, 1), f"process 1.*({LOST}|killed)"), moments=JOINED),
    "launcher killed": Fault(kill_launcher, Promise(_codes(-9, 1), "", MEETING)),
    "machine gone": Fault(kill_host, Promise(_codes(-9, 1), f"process \\d {LOST}", MEETING), places=("hosts",)),
    # On another host its launcher does not hear of the loss: the stopped process itself cannot end.
    "process stopped": Fault(stop_process, Promise(_codes(KILLED, 1), STOPPED, MEETING), places=("two",)),
    "cable pulled": Fault(pull_cable, Promise(_codes(1), f"process \\d {LOST}", MEETING), places=("hosts",)),
    "disk full": Fault(fill_disk, Promise(_codes(2), "No space left on device"), places=("two",)),
    # A job that only starts makes another one, and begins anew.
    "work directory removed": Fault(to_workdir(removed, gone=True), GONE, moments=JOINED),
    "work directory moved": Fault(to_workdir(moved, gone=True), GONE, moments=JOINED),
    "work directory replaced": Fault(to_workdir(replaced), GONE, moments=JOINED),
    "work directory covered": Fault(to_workdir(covered), GONE, places=("two",), moments=JOINED),
    "work directory read-only": Fault(
        to_workdir(read_only), Promise(_codes(2), "Read-only file system"), places=("two",)
    ),
    "launcher asked to stop": Fault(
        asked(signal.SIGTERM, "launcher"), Promise(_codes(ASKED, *BEFORE_IT_LISTENS, -15, 1)), places=("two",)
    ),
    "Ctrl-C": Fault(
        asked(signal.SIGINT, "launcher"), Promise(_codes(ASKED, *BEFORE_IT_LISTENS, -2, 1)), places=("two",)
    ),
    "process asked to stop": Fault(
        asked(signal.SIGTERM, "process"),
        Promise(_codes(ASKED, *BEFORE_IT_LISTENS, 1), "asked to stop|SIGTERM", MEETING),
    ),
    "process paused": Fault(paused("process", HEARTBEAT / 2), GOES_ON, passes=True),
    "launcher paused": Fault(paused("launcher", 2 * HEARTBEAT), GOES_ON, passes=True),
    "cable loose": Fault(loose_cable, GOES_ON, places=("hosts",), passes=True),
    "process killed, restarts": Fault(kill_process, GOES_ON, moments=ONCE, passes=True, options=RESTARTS),
    "process stopped, restarts": Fault(stop_process, GOES_ON, moments=ONCE, passes=True, options=RESTARTS),
    # At the end the other one may be done.
    "launcher started again, restarts": Fault(
        start_launcher_again, GOES_ON, ("hosts",), ONCE[:-1], passes=True, options=RESTARTS
    ),
    "machine started again, restarts": Fault(
        start_host_again, GOES_ON, ("hosts",), ONCE[:-1], passes=True, options=RESTARTS
    ),
    # What it has read already may be all that it needs.
    "store silent": Fault(
        silence_store,
        Promise(_codes(1), r"process \d made no progress for|minute|no byte came", 6 * STALL + SLACK),
        places=("store",),
        moments=("compile", "step", "save", "evaluation"),
    ),
    "store away": Fault(stop_store, GOES_ON, places=("store",), passes=True),
}
_MOUNTED = ("disk full", "work directory covered", "work directory read-only")
NEED_ROOT = tuple(name for name, fault in FAULTS.items() if fault.places == ("hosts",) or name in _MOUNTED)
