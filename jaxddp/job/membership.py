"""Joining a job, which gives a process its peers; and leaving it, in order or after a failure.

In a job that a program joined by `jax.distributed.initialize` itself, the devices carry what the processes compare, and
each process watches itself alone.
"""

import atexit
import contextlib
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import jax

from jaxddp.core.errors import InputError, JaxddpError, Preempted
from jaxddp.core.peers import ALONE, Peers, Spent
from jaxddp.core.phases import doing, phase
from jaxddp.core.user_code import forget, is_ctrl_c, told
from jaxddp.core.versions import installed_version
from jaxddp.job.device_exchange import DevicePeers
from jaxddp.job.environment import Job
from jaxddp.job.link import Link
from jaxddp.job.lone_watch import watch_alone, watch_no_more
from jaxddp.job.watch import Waits, end_now, show_stacks_on_signal

_link: Link | None = None
"""That of this process, for a second call of `join`, and for what ends the process."""


class JobPeers(Peers):
    """The processes of a job that this one is linked with. They watch each other."""

    def __init__(self, link: Link):
        self._link = link

    @property
    def process_index(self) -> int:
        return self._link.job.process_id

    @property
    def process_count(self) -> int:
        return self._link.job.num_processes

    @property
    def longest_wait(self) -> float:
        return self._link.waits.longest

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        with contextlib.nullcontext() if self.is_first else phase("agreement"):
            return self._link.spread(name, make, self.longest_wait)

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str]) -> str:
        with phase("agreement"):
            return self._link.decide(name, text, decide, self.longest_wait)

    def spent(self) -> Mapping[int, Spent]:
        return {process: (alive.step, alive.spent) for process, alive in self._link.standings().items()}


def join(job: Job | None, *, start: float = 60, silence: float = 10, stall: float = 600, shutdown: float = 60) -> Peers:
    """Join the job's processes, before anything asks for devices; without a job, or a second time, only watch.

    From then on this process ends within `silence` and a few seconds when another one is lost, and within `stall` when
    one stands still, which may be itself.

    Args:
        start: seconds until all processes have joined.
        silence: seconds without a heartbeat of a process, before it counts as lost.
        stall: seconds without progress of a process, before it counts as stuck; some phases have a multiple of it, see
            `jaxddp.core.phases`.
        shutdown: seconds to wait for the others at the end.

    Returns:
        This process's `peers`.

    Raises:
        Unreachable: the processes do not reach each other in time.
        InputError: they differ where they must not; see `Link.meet`.
    """
    global _link
    show_stacks_on_signal()
    if job is None or jax.distributed.is_initialized():
        if _link is None:
            watch_alone(stall)
        return peers()
    with doing(f"meeting {job.num_processes} processes"):
        _link = Link.meet(job, _versions(), start, waits=Waits(silence, stall, shutdown))
    watch_no_more()
    sys.excepthook = _on_exception
    if job.process_id == 0:
        print(f"joined: {job}", flush=True)
    try:
        with _without_proxies():
            jax.distributed.initialize(
                _link.jax_address,
                job.num_processes,
                job.process_id,
                local_device_ids=job.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(start),
                # The watch must detect a loss first: it can name the process.
                heartbeat_timeout_seconds=math.ceil(silence * 3),
                shutdown_timeout_seconds=math.ceil(shutdown),
                coordinator_bind_address=_link.jax_address if job.process_id == 0 else None,
            )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise InputError(
            "JAX was used before this process joined its job; in a script call prepare_training first, in a recipe "
            "file use JAX inside its functions only"
        ) from error
    atexit.register(_leave, _link)
    return peers()


def peers() -> Peers:
    """The processes of the job that this one has joined, or that its program told JAX of; else it is alone.

    Whoever can be handed the peers takes them from there.
    """
    if _link is not None:
        return JobPeers(_link)
    return DevicePeers() if jax.distributed.is_initialized() else ALONE


def abandon(reason: str, code: int) -> None:
    """In a job, tell the others why this process ends, and end it at once; outside a job, return.

    If another process was lost first, that loss is the reason, and its code the exit code, unless it ended for the very
    same reason: then all found it, and each says it in its own name. After a preemption this returns too: all
    processes stop at the same step, and one that is done must not end one that still writes.
    """
    if _link is None or code == Preempted.exit_code:
        return
    loss, own = _link.watch.loss(), f"ended: {reason}"
    if loss is not None and loss.reason != own:
        end_now(str(loss), loss.code)
    _link.fail(own, code)
    end_now(reason, code)


def _versions() -> dict[str, str]:
    """The versions that must agree for the processes to compile the same program."""
    packages = ("jaxddp", "jax", "jaxlib", "flax", "optax")
    versions = {f"{package}'s version": installed_version(package) or "not installed" for package in packages}
    return {"Python": ".".join(platform.python_version_tuple()[:2])} | versions


def _leave(link: Link) -> None:
    """Leave the job with all others.

    They watch each other until JAX has let all go: its barrier may wait for processes that still compute, and where it
    notices a loss first, it ends the process by SIGABRT.
    """
    if not link.finish():
        # JAX's barrier would wait for them once more, and then abort.
        link.fail(f"ended its program, and waited {link.waits.shutdown:g} s for the others", 1)
        advice = "let all processes end alike, or raise parallel.shutdown_timeout"
        end_now(f"the other processes were not done {link.waits.shutdown:g} s after this one; {advice}", 1)
    jax.distributed.shutdown()
    link.leave()


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hide the proxies of the environment: JAX reaches its coordinator through gRPC, which would use them."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For uncaught exceptions: the other processes must not wait for this one."""
    if isinstance(error, Preempted) and _link is not None:
        _leave(_link)
        end_now(str(error), error.exit_code)
    if isinstance(error, JaxddpError):
        abandon(told(error), error.exit_code)
    loss = _link.watch.loss() if _link is not None else None
    if loss is None:
        # The line that follows says it.
        forget(error)
        sys.__excepthook__(kind, error, trace)
    abandon(told(error), 130 if is_ctrl_c(error) else 1)
