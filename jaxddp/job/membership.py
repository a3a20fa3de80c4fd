"""Joins a job and leaves it: cleanly, after a failure, or on SIGTERM.

If a program called `jax.distributed.initialize` itself, its processes exchange values through their devices, and each
process watches only itself.
"""

import atexit
import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxddp.core.libraries as libraries
from jaxddp.core.errors import InputError, JaxddpError, Preempted
from jaxddp.core.peers import ALONE, Peers, T, answer_of, joined, record_joined, result_of
from jaxddp.core.phases import doing
from jaxddp.core.process_exit import INTERRUPTED, end_now, show_stacks_on_signal, watch_alone
from jaxddp.core.user_code import describe_error, remove_description
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job
from jaxddp.job.tpu import sigterm_on_eviction
from jaxddp.job.watchdog import Timeouts

# JAX's `reached_preemption_sync_point` needs a number that increases by 1 in each call. The step number is unsuitable,
# because one dispatch may have several steps, and validation has none. So `_calls` counts the calls over all runs of
# the process. No other code may call JAX's function.
_calls = itertools.count(1)
_log = logging.getLogger("jaxddp.experiment")


def join(job: Job | None, *, start: float = 60, silence: float = 10, stall: float = 600, shutdown: float = 60) -> Peers:
    """Join the processes of a job, and return them as peers. Call it before any code uses JAX's devices.

    Afterwards this process ends within `silence` and a few seconds after the loss of another process, and within
    `stall` seconds after the last progress of a stuck process. Without a job, or if the program has called
    `jax.distributed.initialize`, a watchdog watches this process alone. A second call changes nothing. The arguments
    are those of `Timeouts`.

    Raises:
        Unreachable: the processes do not reach each other in time.
        InputError: the versions or ids of the processes conflict; see `ControlPlane`.
    """
    show_stacks_on_signal()
    if job is None or jax.distributed.is_initialized():
        if joined() is ALONE and jax.distributed.is_initialized():
            record_joined(DevicePeers())
        if not isinstance(joined(), ControlPlane):
            watch_alone(stall)
        return joined()
    with doing(f"meeting {job.num_processes} processes"):
        plane = ControlPlane(job, _versions(), Timeouts(start, silence, stall, shutdown))
    record_joined(plane)
    watch_alone(math.inf)
    sys.excepthook = functools.partial(_on_exception, plane)
    if job.process_id == 0:
        print(f"joined: {job}", flush=True)
    _set_gloo_address(plane.own_address)
    try:
        with _without_proxies():
            jax.distributed.initialize(
                plane.jax_address,
                job.num_processes,
                job.process_id,
                local_device_ids=job.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(start),
                # The watchdog must detect a loss before JAX does, because only the watchdog names the process.
                heartbeat_timeout_seconds=math.ceil(silence * 3),
                shutdown_timeout_seconds=math.ceil(shutdown),
                coordinator_bind_address=plane.jax_address if job.process_id == 0 else None,
            )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        advice = "in a script call prepare_training first, in a recipe file use JAX inside its functions only"
        raise InputError("JAX was used before this process joined its job", advice=advice) from error
    atexit.register(_leave, plane)
    return plane


def abandon(reason: str, code: int) -> None:
    """In a job, send the others the reason, and end this process at once; see `Peers.abandon`.

    After a preemption, whose code is 75, return: all processes stop at the same step, and a process that is done must
    not end a process that still saves.
    """
    if code != Preempted.exit_code:
        joined().abandon(reason, code)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[int], bool]]:
    """Catch SIGTERM and Ctrl-C in the block. Yield a function to call between steps; it returns whether to stop.

    In a job, JAX's coordination service catches SIGTERM in any process, and makes all processes stop at the same call.
    So all processes must call the function equally often. Ctrl-C becomes a SIGTERM.

    Ctrl-C before the first call and a second Ctrl-C are not caught. Without a job, the block ends with a
    KeyboardInterrupt after Ctrl-C. It has the message of a `Preempted`, if that ended the block.
    """
    # This function is in an experimental module, so later versions of JAX may not have it.
    reached_sync_point: Any = getattr(multihost_utils, "reached_preemption_sync_point", None)
    in_job, is_main = jax.process_count() > 1, threading.current_thread() is threading.main_thread()
    # Python handles signals only in the main thread. A program that trains in another thread handles SIGTERM itself.
    can_stop = callable(reached_sync_point) if in_job else is_main
    if not can_stop:
        if in_job:
            libraries.warn_missing("jax", "reached_preemption_sync_point", "SIGTERM ends a job without saving")
        yield lambda step: False
        return
    requests, is_training = list[int](), False
    # In a job, JAX catches SIGTERM.
    caught = [signal.SIGINT] if in_job else [signal.SIGTERM, signal.SIGINT]
    before: dict[int, Any] = {number: signal.getsignal(number) for number in caught if is_main}

    def should_stop(step: int) -> bool:
        nonlocal is_training
        is_training = True
        return reached_sync_point(next(_calls)) if in_job else bool(requests)

    def request(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if requests or not is_training:
                return before[number](number, frame)
            # This thread may be writing, also to a stopped terminal, and cannot begin another write meanwhile.
            line = "Ctrl-C: the run saves after this step and stops; another Ctrl-C ends it at once"
            threading.Thread(target=_log.warning, args=[line], daemon=True).start()
        requests.append(number)
        if in_job:
            os.kill(os.getpid(), signal.SIGTERM)

    for number, handler in before.items():
        # A program in the background of a shell ignores SIGINT.
        if number == signal.SIGTERM or callable(handler):
            signal.signal(number, request)
    ending = "interrupted; the run had ended"
    try:
        with sigterm_on_eviction():
            yield should_stop
    except Preempted as error:
        if in_job or signal.SIGINT not in requests:
            raise
        ending = str(error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in requests and not in_job:
        # A script that an instance of a subclass ends has another exit code.
        interrupt: Any = KeyboardInterrupt(ending)
        interrupt._render_traceback_ = functools.partial(JaxddpError._render_traceback_, interrupt)
        raise interrupt


class DevicePeers(Peers):
    """The processes of a program that called `jax.distributed.initialize` itself; see the module."""

    def __init__(self) -> None:
        self.process_index, self.process_count = jax.process_index(), jax.process_count()

    def decide(self, name: str, text: str, decide: Callable[[list[str]], T]) -> T:
        texts = _gather(text)
        return result_of(_gather(answer_of(lambda: decide(texts)) if self.is_first else "")[0])


def _gather(text: str) -> list[str]:
    """Return the texts of all processes, in the order of their ids."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.array([len(encoded)])))[:, 0]
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: len(encoded)] = encoded
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _versions() -> dict[str, str]:
    """Return the versions that must be equal, so that all processes compile the same program."""
    packages = ("jaxddp", "jax", "jaxlib", "flax", "optax")
    versions = {f"{package}'s version": libraries.installed_version(package) or "not installed" for package in packages}
    # A checkout keeps its version when its files change. The configs are in the package only if it is installed.
    root = Path(__file__).parent.parent
    code = [path.read_bytes() for path in sorted(root.rglob("[!.]*.py")) if root / "configs" not in path.parents]
    versions["the digest of jaxddp's files"] = hashlib.sha256(b"".join(code)).hexdigest()[:16]
    return {"Python": ".".join(platform.python_version_tuple()[:2])} | versions


def _leave(plane: ControlPlane) -> None:
    """Leave the job together with all others.

    The processes watch each other until JAX's shutdown barrier has passed. If JAX detected a loss before the watchdog
    did, it would end this process by SIGABRT.
    """
    if not plane.finish():
        # JAX's shutdown barrier would wait for the other processes again, and then abort this process.
        plane.fail(f"ended its program, and waited {plane.timeouts.shutdown:g} s for the others", 1)
        advice = "let all make the same calls, such as evaluate, and end alike, or raise parallel.shutdown_timeout"
        end_now(f"the other processes were not done {plane.timeouts.shutdown:g} s after this one; {advice}", 1)
    jax.distributed.shutdown()
    plane.leave()


def _set_gloo_address(address: str) -> None:
    """Let gloo use this address. The machine's name, by default, may have none, or a loopback address, as on Debian."""
    try:
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        _jax = None
    make: Any = getattr(_jax, "make_gloo_tcp_collectives", None)
    if _jax is not None and "hostname" in (make.__doc__ or ""):
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
    else:
        names = "on CPUs the name of each machine must have an address that the others reach"
        libraries.warn_missing("jaxlib", "make_gloo_tcp_collectives", names)


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Unset the proxy variables in the block. JAX connects to its coordinator through gRPC, which would use them."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _on_exception(plane: ControlPlane, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Handle an uncaught exception, so that the other processes do not wait for this one."""
    if isinstance(error, Preempted):
        _leave(plane)
        end_now(str(error), error.exit_code)
    if isinstance(error, JaxddpError):
        plane.abandon(describe_error(error), error.exit_code)
    if plane.watchdog.loss() is None:
        # The description is removed here, because `abandon` writes it as the last line.
        remove_description(error)
        sys.__excepthook__(kind, error, trace)
    plane.abandon(describe_error(error), INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
