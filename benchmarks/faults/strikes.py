"""Injects the faults of `benchmarks/chaos.py`: into processes, hosts, cables, disks, stores and work directories."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.hosts import Cable, Store, fill
from benchmarks.faults.jobs import HEARTBEAT, Job, send
from benchmarks.faults.work_directory import check_gone

AWAY = 3.0
"""Maximum seconds until a killed launcher or host is started again."""


@dataclass
class Struck:
    """The target of a fault: the job, where it runs, and the process or host."""

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
    """Kills a host without closing its connections, as a power failure does."""
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


def signaled(number: signal.Signals, whom: str) -> Strike:
    """Returns a fault that sends a process or a launcher a signal to stop."""

    @contextmanager
    def strike(struck: Struck) -> Iterator[None]:
        pid = struck.job.worker(struck.any_rank()) if whom == "process" else struck.job.launchers[struck.any_host()].pid
        send(pid, number)
        yield

    return strike


def paused(whom: str, longest: float) -> Strike:
    """Returns a fault that stops a process or a launcher for a while."""

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


def to_workdir(change: Callable[[Path], AbstractContextManager[None]], *, gone: bool = False) -> Strike:
    """Returns a fault that changes the work directory.

    With `gone` the directory does not exist afterwards. The fault raises OSError if the failed job has created another
    one, which a later run would use.
    """

    @contextmanager
    def strike(struck: Struck) -> Iterator[None]:
        if not struck.workdir.is_dir():
            raise ProcessLookupError("there is no work directory yet")
        with change(struck.workdir):
            yield
            if gone and any(struck.job.codes):
                check_gone(struck.workdir)

    return strike
