"""Joins a job and leaves it, either cleanly or after a failure.

If a program called `jax.distributed.initialize` itself, its processes exchange values through their devices, and each
process watches only itself.
"""

import atexit
import contextlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from types import TracebackType

import jax

from jaxddp.core.errors import InputError, JaxddpError, Preempted
from jaxddp.core.libraries import installed_version
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import doing
from jaxddp.core.user_code import describe_error, is_ctrl_c, remove_description
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job
from jaxddp.job.job_peers import DevicePeers, JobPeers
from jaxddp.job.process_exit import end_now, show_stacks_on_signal
from jaxddp.job.watchdog import Timeouts, stop_watching_alone, watch_alone

_plane: ControlPlane | None = None
"""The control plane of this process; None before it has joined a job."""


def join(job: Job | None, *, start: float = 60, silence: float = 10, stall: float = 600, shutdown: float = 60) -> Peers:
    """Join the processes of a job. Call it before any code uses JAX's devices.

    Afterwards this process ends within `silence` and a few seconds after the loss of another process, and within
    `stall` seconds after the last progress of a stuck process. Without a job, or if the program has called
    `jax.distributed.initialize`, a watchdog watches this process alone. A second call changes nothing.

    Args:
        start: maximum seconds until all processes have joined.
        silence: seconds without a heartbeat after which a process counts as lost.
        stall: seconds without progress after which a process counts as stuck. The limit of some phases is a multiple of
            `stall`; see `jaxddp.core.phases`.
        shutdown: seconds to wait for the other processes at the end.

    Returns:
        The `peers` of this process.

    Raises:
        Unreachable: the processes do not reach each other in time.
        InputError: the versions or ids of the processes conflict; see `ControlPlane.join`.
    """
    global _plane
    show_stacks_on_signal()
    if job is None or jax.distributed.is_initialized():
        if _plane is None:
            watch_alone(stall)
        return peers()
    with doing(f"meeting {job.num_processes} processes"):
        _plane = ControlPlane.join(job, _versions(), start, timeouts=Timeouts(silence, stall, shutdown))
    stop_watching_alone()
    sys.excepthook = _on_exception
    if job.process_id == 0:
        print(f"joined: {job}", flush=True)
    try:
        with _without_proxies():
            jax.distributed.initialize(
                _plane.jax_address,
                job.num_processes,
                job.process_id,
                local_device_ids=job.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(start),
                # The watchdog must detect a loss before JAX does, because only the watchdog names the process.
                heartbeat_timeout_seconds=math.ceil(silence * 3),
                shutdown_timeout_seconds=math.ceil(shutdown),
                coordinator_bind_address=_plane.jax_address if job.process_id == 0 else None,
            )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise InputError(
            "JAX was used before this process joined its job; in a script call prepare_training first, in a recipe "
            "file use JAX inside its functions only"
        ) from error
    atexit.register(_leave, _plane)
    return peers()


def peers() -> Peers:
    """Return the processes of this process's job; `ALONE` without a job.

    Prefer to pass the peers as an argument.
    """
    if _plane is not None:
        return JobPeers(_plane)
    return DevicePeers() if jax.distributed.is_initialized() else ALONE


def abandon(reason: str, code: int) -> None:
    """In a job, send the others the reason, and end this process at once. Outside a job, return.

    If another process was lost first, this process ends with the reason and exit code of that loss. If both reasons are
    equal, all processes have the same fault, and each process reports its own. After a preemption, return, too: all
    processes stop at the same step, and a process that is done must not end a process that still saves.
    """
    if _plane is None or code == Preempted.exit_code:
        return
    loss, own_reason = _plane.watchdog.loss(), f"ended: {reason}"
    if loss is not None and loss.reason != own_reason:
        end_now(str(loss), loss.code)
    _plane.fail(own_reason, code)
    end_now(reason, code)


def _versions() -> dict[str, str]:
    """Return the versions that must be equal, so that all processes compile the same program."""
    packages = ("jaxddp", "jax", "jaxlib", "flax", "optax")
    versions = {f"{package}'s version": installed_version(package) or "not installed" for package in packages}
    return {"Python": ".".join(platform.python_version_tuple()[:2])} | versions


def _leave(plane: ControlPlane) -> None:
    """Leave the job together with all others.

    The processes watch each other until JAX's shutdown barrier has passed. If JAX detected a loss before the watchdog
    did, it would end this process by SIGABRT.
    """
    if not plane.finish():
        # JAX's shutdown barrier would wait for the other processes again, and then abort this process.
        plane.fail(f"ended its program, and waited {plane.timeouts.shutdown:g} s for the others", 1)
        advice = "let all processes end in the same way, or raise parallel.shutdown_timeout"
        end_now(f"the other processes were not done {plane.timeouts.shutdown:g} s after this one; {advice}", 1)
    jax.distributed.shutdown()
    plane.leave()


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Unset the proxy variables in the block. JAX connects to its coordinator through gRPC, which would use them."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Handle an uncaught exception, so that the other processes do not wait for this one."""
    if isinstance(error, Preempted) and _plane is not None:
        _leave(_plane)
        end_now(str(error), error.exit_code)
    if isinstance(error, JaxddpError):
        abandon(describe_error(error), error.exit_code)
    loss = _plane.watchdog.loss() if _plane is not None else None
    if loss is None:
        # The description is removed here, because `abandon` writes it as the last line.
        remove_description(error)
        sys.__excepthook__(kind, error, trace)
    abandon(describe_error(error), 130 if is_ctrl_c(error) else 1)
