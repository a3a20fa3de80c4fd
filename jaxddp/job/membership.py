"""Joining a job and leaving it, well or not. The one place that touches JAX's coordination service.

Its client has no public API; here it carries the values that the processes compare.
"""

import atexit
import contextlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

import jax

from jaxddp.errors import InputError, JaxddpError, Preempted
from jaxddp.job.environment import Job
from jaxddp.job.rendezvous import meet
from jaxddp.job.watch import Watch, end_now
from jaxddp.wording import show


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a process waits for others, in seconds.

    Attributes:
        start: for all to come.
        compare: for each value that is compared; one host may still be looking through its files.
        silence: without a sign of life from a process, before it counts as lost.
        shutdown: for the others at the end.
    """

    start: float = 60
    compare: float = 600
    silence: float = 10
    shutdown: float = 60


_watch: Watch | None = None
_limits = Limits()
_exchanges = itertools.count()


def join(job: Job | None, limits: Limits | None = None) -> None:
    """Join the job's processes, once, before anything asks for devices. Without a job, nothing happens.

    From here on this process ends, within `limits.silence` and a few seconds, when another one is lost.

    Raises:
        InputError: the processes did not find each other or do not fit together; see `rendezvous.meet`.
    """
    global _watch, _limits
    if job is None or jax.distributed.is_initialized():
        return
    _limits = limits or Limits()
    if job.process_id == 0:
        print(f"joined: {job}", flush=True)
    meeting = meet(job, _versions(), _limits.start)
    _watch = Watch(meeting, silence=_limits.silence)
    sys.excepthook = _on_exception
    with _without_proxies():
        jax.distributed.initialize(
            meeting.jax_address,
            job.num_processes,
            job.process_id,
            local_device_ids=job.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=int(_limits.start),
            # The watch is to find a loss first: it can say whose.
            heartbeat_timeout_seconds=int(_limits.silence) * 3,
            shutdown_timeout_seconds=int(_limits.shutdown),
            coordinator_bind_address=meeting.jax_address if job.process_id == 0 else None,
        )
    # Run before JAX's own farewell, at whose barrier a process may wait for others that still compute.
    atexit.register(_watch.close)


def abandon(reason: str, code: int) -> None:
    """End this process at once and tell the others why, where it is in a job; return where it is alone.

    If another process was lost first, that is the reason to give, and its code the one to end with. After a preemption
    it returns as well: all stop at one step, and who has finished first must not end one that is still writing.
    """
    if _watch is None or code == Preempted.exit_code:
        return
    loss = _watch.loss()
    if loss is not None:
        end_now(str(loss), loss.code)
    _watch.fail(f"ended: {reason}", code)
    end_now(reason, code)


def is_first() -> bool:
    """Whether this process is the one that writes and prints for all."""
    state = _coordination()
    return state.client is None or state.process_id == 0


def agree(values: Mapping[str, str]) -> None:
    """Compare values between all processes, before anything is computed from them.

    Raises:
        InputError: names the first that differs, a process where it does, and both values.
    """
    for process, text in enumerate(exchange("agree", json.dumps(dict(values)))):
        theirs = json.loads(text)
        for name, value in values.items():
            if theirs.get(name) != value:
                raise InputError(
                    f"{name} differs: process {_coordination().process_id} has {show(value)}, process {process} has "
                    f"{show(theirs.get(name))}; start every process with the same"
                )


def exchange(name: str, value: str) -> list[str]:
    """Every process's value, in order of the processes; needs no device. All must ask for the same.

    Raises:
        InputError: a process gave none in time.
    """
    state = _coordination()
    if state.client is None:
        return [value]
    # A key is written once, and a notebook may prepare the same training twice.
    prefix = f"jaxddp/{next(_exchanges)}/{name}"
    state.client.key_value_set(f"{prefix}/{state.process_id}", value)
    values = []
    for process in range(state.num_processes):
        try:
            values.append(state.client.blocking_key_value_get(f"{prefix}/{process}", int(_limits.compare * 1000)))
        except jax.errors.JaxRuntimeError:
            raise InputError(
                f"{name}: process {process} did not say in {_limits.compare:g} s; is it doing something else?"
            ) from None
    return values


def _coordination() -> Any:
    """The state of JAX's coordination service, which is there before any device; outside a job its client is None."""
    from jax._src import distributed

    return distributed.global_state


def _versions() -> dict[str, str]:
    """What must be the same on every host for the processes to compile the same program."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("jaxddp", "jax", "jaxlib", "flax", "optax"):
        try:
            versions[f"{package}'s version"] = version(package)
        except PackageNotFoundError:
            versions[f"{package}'s version"] = "not installed"
    return versions


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """JAX's coordinator is spoken to by gRPC, which would look for it behind the proxies that the environment names."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception that nobody caught: the others must not wait for this process."""
    if isinstance(error, Preempted) and _watch is not None:
        _watch.close()
        jax.distributed.shutdown()
        end_now(str(error), error.exit_code)
    if isinstance(error, JaxddpError):
        abandon(str(error), error.exit_code)
    loss = _watch.loss() if _watch is not None else None
    if loss is None:
        sys.__excepthook__(kind, error, trace)
    abandon(f"{kind.__name__}: {' '.join(str(error).split())[:500]}", 130 if kind is KeyboardInterrupt else 1)
