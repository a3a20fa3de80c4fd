"""Joining a job and leaving it, in order or after a failure; and what all processes of it know of each other.

In a job that a program joined by `jax.distributed.initialize` itself, the devices carry what the processes compare, and
each process watches itself alone.
"""

import atexit
import contextlib
import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import jax

from jaxddp.errors import InputError, JaxddpError, Preempted
from jaxddp.job.device_exchange import decided_on_devices
from jaxddp.job.environment import Job
from jaxddp.job.link import Link
from jaxddp.job.lone_watch import watch_alone, watch_no_more
from jaxddp.job.messages import Alive
from jaxddp.job.watch import Waits, end_now, show_stacks_on_signal
from jaxddp.own_code import forget, is_ctrl_c, told
from jaxddp.phases import doing, phase
from jaxddp.versions import installed_version
from jaxddp.wording import show

_link: Link | None = None


def join(job: Job | None, *, start: float = 60, silence: float = 10, stall: float = 600, shutdown: float = 60) -> None:
    """Join the job's processes, before anything asks for devices; without a job, or a second time, only watch.

    From then on this process ends within `silence` and a few seconds when another one is lost, and within `stall` when
    one stands still, which may be itself.

    Args:
        start: seconds until all processes have joined.
        silence: seconds without a heartbeat of a process, before it counts as lost.
        stall: seconds without progress of a process, before it counts as stuck; some phases have a multiple of it, see
            `jaxddp.phases`.
        shutdown: seconds to wait for the others at the end.

    Raises:
        Unreachable: the processes do not reach each other in time.
        InputError: they differ where they must not; see `Link.meet`.
    """
    global _link
    show_stacks_on_signal()
    if job is None or jax.distributed.is_initialized():
        if _link is None:
            watch_alone(stall)
        return
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


def is_first() -> bool:
    """Whether this is process 0, which writes and prints for all."""
    if _link is not None:
        return _link.job.process_id == 0
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def is_alone() -> bool:
    """Whether this process is in no job."""
    return _link is None and not jax.distributed.is_initialized()


def agree(values: Mapping[str, str]) -> None:
    """See that all processes have the same values; an `InputError` names the first that differs, and who has what.

    Each gives a digest; only where one differs from that of process 0, its values follow.
    """
    told = json.dumps(dict(values))
    digests = "digests", hashlib.sha256(told.encode()).hexdigest()
    other = int(_decide(*digests, lambda all_of: str(next((p for p, d in enumerate(all_of) if d != all_of[0]), 0))))
    if other:
        own = told if _process_index() in (0, other) else ""
        raise InputError(_decide("values", own, lambda all_of: _difference(all_of, other)))


def exchange(name: str, value: str) -> list[str]:
    """The values of all processes, in order of their ids. Needs no device; all processes must call it alike.

    Raises:
        Unreachable: a process gives none in time.
    """
    return json.loads(_decide(name, value, json.dumps))


def from_first(name: str, make: Callable[[], str]) -> str:
    """What process 0 makes, in the phase in which it is; it alone calls the function, and all must call this alike.

    Raises:
        InputError, Unreachable: that of process 0, on every process.
    """
    if _link is None:
        return _decide(name, "", lambda _: make())
    with contextlib.nullcontext() if is_first() else phase("agreement"):
        return _link.spread(name, make, _link.waits.longest)


def longest_wait() -> float:
    """How many seconds a process waits for another one, which was named by then if it is stuck."""
    return (Waits() if _link is None else _link.waits).longest


def standings() -> dict[int, Alive]:
    """Where each process stands, and where its seconds went; only process 0 hears of all. Empty outside of our jobs."""
    return {} if _link is None else _link.standings()


def _decide(name: str, text: str, decide: Callable[[list[str]], str]) -> str:
    """What process 0 makes of the texts of all."""
    if _link is not None:
        with phase("agreement"):
            return _link.decide(name, text, decide, _link.waits.longest)
    return decided_on_devices(text, decide) if jax.distributed.is_initialized() else decide([text])


def _process_index() -> int:
    return jax.process_index() if _link is None else _link.job.process_id


def _difference(told: list[str], process: int) -> str:
    """What tells the values of a process from those of process 0."""
    own, theirs = (json.loads(told[each]) for each in (0, process))
    name = next(name for name in own | theirs if own.get(name) != theirs.get(name))
    return (
        f"{name} differs: process 0 has {show(own.get(name))}, process {process} has {show(theirs.get(name))}; "
        "start every process with the same"
    )


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
