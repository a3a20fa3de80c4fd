"""Joining a job and leaving it, in order or after a failure. The only module that uses JAX's coordination service.

The client of that service has no public API; it carries the values that the processes compare.
"""

import atexit
import contextlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any

import jax

from jaxddp.errors import InputError, JaxddpError, Preempted
from jaxddp.job.environment import Job
from jaxddp.job.rendezvous import meet
from jaxddp.job.watch import Watch, end_now
from jaxddp.wording import show

_COMPARE_SECONDS = 600
"""How long a process waits for each value that is compared; another host may still be listing its files."""

_watch: Watch | None = None
_exchanges = itertools.count()


def join(job: Job | None, *, start: float = 60, silence: float = 10, shutdown: float = 60) -> None:
    """Join the job's processes, before anything asks for devices. Does nothing without a job, or a second time.

    From then on this process ends within `silence` and a few seconds when another one is lost.

    Args:
        start: seconds until all processes have joined.
        silence: seconds without a heartbeat of a process, before it counts as lost.
        shutdown: seconds to wait for the others at the end.

    Raises `InputError` where the processes do not reach each other, or differ where they must not; see `meet`.
    """
    global _watch
    if job is None or jax.distributed.is_initialized():
        return
    if job.process_id == 0:
        print(f"joined: {job}", flush=True)
    meeting = meet(job, _versions(), start)
    _watch = Watch(meeting, silence=silence)
    sys.excepthook = _on_exception
    try:
        with _without_proxies():
            jax.distributed.initialize(
                meeting.jax_address,
                job.num_processes,
                job.process_id,
                local_device_ids=job.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=int(start),
                # The watch must detect a loss first: it can name the process.
                heartbeat_timeout_seconds=int(silence) * 3,
                shutdown_timeout_seconds=int(shutdown),
                coordinator_bind_address=meeting.jax_address if job.process_id == 0 else None,
            )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise InputError(
            "JAX was used before this process joined its job; in a script call prepare_training first, in a recipe "
            "file use JAX inside its functions only"
        ) from error
    # Runs before JAX's own shutdown, whose barrier may wait for processes that still compute.
    atexit.register(_watch.close)


def abandon(reason: str, code: int) -> None:
    """In a job, tell the others why this process ends, and end it at once; outside a job, return.

    If another process was lost first, that loss is the reason, and its code the exit code, unless it ended for the very
    same reason: then all found it, and each says it in its own name. After a preemption this returns too: all
    processes stop at the same step, and one that is done must not end one that still writes.
    """
    if _watch is None or code == Preempted.exit_code:
        return
    loss, own = _watch.loss(), f"ended: {reason}"
    if loss is not None and loss.reason != own:
        end_now(str(loss), loss.code)
    _watch.fail(own, code)
    end_now(reason, code)


def is_first() -> bool:
    """Whether this is process 0, which writes and prints for all."""
    return _coordination().client is None or _coordination().process_id == 0


def agree(values: Mapping[str, str]) -> None:
    """See that all processes have the same values; an `InputError` names the first that differs, and who has what."""
    values, own = dict(values), _coordination().process_id
    for process, text in enumerate(exchange("agree", json.dumps(values))):
        theirs = json.loads(text)
        for name in values | theirs:
            if theirs.get(name) != values.get(name):
                raise InputError(
                    f"{name} differs: process {own} has {show(values.get(name))}, process {process} has "
                    f"{show(theirs.get(name))}; start every process with the same"
                )


def exchange(name: str, value: str) -> list[str]:
    """The values of all processes, in order of their ids. Needs no device; all processes must call it alike.

    Raises `InputError` where a process gives none in time.
    """
    state = _coordination()
    if state.client is None:
        return [value]
    # A key can be written only once, and a notebook may prepare the same training twice.
    prefix = f"jaxddp/{next(_exchanges)}/{name}"
    state.client.key_value_set(f"{prefix}/{state.process_id}", value)
    values = []
    for process in range(state.num_processes):
        try:
            values.append(state.client.blocking_key_value_get(f"{prefix}/{process}", 1000 * _COMPARE_SECONDS))
        except jax.errors.JaxRuntimeError:
            raise InputError(
                f"{name}: process {process} gave no value in {_COMPARE_SECONDS} s; does it run the same program?"
            ) from None
    return values


def from_first(name: str, make: Callable[[], str]) -> str:
    """What process 0 makes; it alone calls the function, and all processes must call this alike.

    Raises:
        InputError: that of process 0, on every process.
    """
    value, error = "", None
    if is_first():
        try:
            value = make()
        except InputError as caught:
            error = str(caught)
    value, error = json.loads(exchange(name, json.dumps([value, error]))[0])
    if error is not None:
        raise InputError(error)
    return value


def _coordination() -> Any:
    """The state of JAX's coordination service, which needs no device; outside a job its client is None."""
    from jax._src import distributed

    return distributed.global_state


def _versions() -> dict[str, str]:
    """The versions that must agree for the processes to compile the same program."""
    packages = ("jaxddp", "jax", "jaxlib", "flax", "optax")
    versions = {f"{package}'s version": installed_version(package) or "not installed" for package in packages}
    return {"Python": ".".join(platform.python_version_tuple()[:2])} | versions


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
