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
from benchmarks.faults.jobs import HEARTBEAT, Job, send_signal
from benchmarks.faults.work_directory import check_gone

MAX_SECONDS_AWAY = 3.0
"""Maximum time until a killed launcher or host is started again."""


@dataclass
class Target:
    """The target of a fault: the job, where it runs, and the process or host."""

    job: Job
    rng: random.Random
    workdir: Path
    cable: Cable | None = None
    store: Store | None = None
    disk: Path | None = None

    def any_rank(self) -> int:
        return self.rng.randrange(len(self.job.hosts) * self.job.processes)

    def any_host(self) -> int:
        return self.rng.randrange(len(self.job.hosts))


Strike = Callable[[Target], AbstractContextManager[None]]


@contextmanager
def kill_process(target: Target) -> Iterator[None]:
    send_signal(target.job.worker(target.any_rank()), signal.SIGKILL)
    yield


@contextmanager
def kill_keeper(target: Target) -> Iterator[None]:
    send_signal(target.job.keeper(1), signal.SIGKILL)
    yield


@contextmanager
def kill_launcher(target: Target) -> Iterator[None]:
    send_signal(target.job.launchers[target.any_host()].pid, signal.SIGKILL)
    yield


@contextmanager
def start_launcher_again(target: Target) -> Iterator[None]:
    host = target.any_host()
    send_signal(target.job.launchers[host].pid, signal.SIGKILL)
    time.sleep(target.rng.uniform(0, MAX_SECONDS_AWAY))
    target.job.launch_again(host)
    yield


@contextmanager
def kill_host(target: Target, host: int | None = None) -> Iterator[None]:
    """Kill a host without closing its connections, as a power failure does."""
    host, cable = target.any_host() if host is None else host, target.cable
    assert cable is not None
    cable.pull(host)
    try:
        for pid in target.job.processes_of_host(host):
            send_signal(pid, signal.SIGKILL)
        yield
    finally:
        cable.plug(host)


@contextmanager
def start_host_again(target: Target) -> Iterator[None]:
    host = target.any_host()
    with kill_host(target, host):
        time.sleep(target.rng.uniform(0, MAX_SECONDS_AWAY))
    target.job.launch_again(host)
    yield


@contextmanager
def stop_process(target: Target) -> Iterator[None]:
    send_signal(target.job.worker(target.any_rank()), signal.SIGSTOP)
    yield


@contextmanager
def pull_cable(target: Target) -> Iterator[None]:
    host, cable = target.any_host(), target.cable
    assert cable is not None
    cable.pull(host)
    try:
        yield
    finally:
        cable.plug(host)


@contextmanager
def fill_disk(target: Target) -> Iterator[None]:
    assert target.disk is not None
    filler = fill(target.disk)
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


def signal_fault(number: signal.Signals, receiver: str) -> Strike:
    """Return a strike that sends the signal `number`, which asks a process or a launcher to stop."""

    @contextmanager
    def strike(target: Target) -> Iterator[None]:
        pid = (
            target.job.worker(target.any_rank())
            if receiver == "process"
            else target.job.launchers[target.any_host()].pid
        )
        send_signal(pid, number)
        yield

    return strike


def pause_fault(receiver: str, longest: float) -> Strike:
    """Return a strike that stops a process or a launcher for a while."""

    @contextmanager
    def strike(target: Target) -> Iterator[None]:
        pid = (
            target.job.worker(target.any_rank())
            if receiver == "process"
            else target.job.launchers[target.any_host()].pid
        )
        send_signal(pid, signal.SIGSTOP)
        try:
            time.sleep(target.rng.uniform(0.2, longest))
        finally:
            send_signal(pid, signal.SIGCONT)
        yield

    return strike


@contextmanager
def loose_cable(target: Target) -> Iterator[None]:
    with pull_cable(target):
        time.sleep(target.rng.uniform(0.1, HEARTBEAT / 3))
    yield


@contextmanager
def stop_store(target: Target) -> Iterator[None]:
    assert target.store is not None
    target.store.stop()
    with contextlib.ExitStack() as stack:
        stack.callback(target.store.start)
        time.sleep(target.rng.uniform(0.5, 4))
    yield


@contextmanager
def silence_store(target: Target) -> Iterator[None]:
    assert target.store is not None
    target.store.responding.clear()
    try:
        yield
    finally:
        target.store.responding.set()


def workdir_fault(change: Callable[[Path], AbstractContextManager[None]], *, gone: bool = False) -> Strike:
    """Return a fault that changes the work directory.

    With `gone` the change removes the directory. Then the fault raises OSError if the failed job has created it again,
    because a later run would use it.
    """

    @contextmanager
    def strike(target: Target) -> Iterator[None]:
        if not target.workdir.is_dir():
            raise ProcessLookupError("there is no work directory yet")
        with change(target.workdir):
            yield
            if gone and any(target.job.codes):
                check_gone(target.workdir)

    return strike
