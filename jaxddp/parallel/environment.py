"""Who this process is in its job, read from the environment, and the one place that joins a job.

The only module that touches the coordination service's client, which has no public API.
"""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxddp.errors import InputError

_TIMEOUT_SECONDS = 60
_HEARTBEAT_SECONDS = 10
_exchanges = itertools.count()
_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclass(frozen=True)
class Job:
    """This process's place: the coordinator's `host:port`, how many processes there are, and which one this is."""

    coordinator: str
    num_processes: int
    process_id: int


def find_job(environ: Mapping[str, str] = os.environ) -> Job | None:
    """Read the job from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; None where none of them is set.

    Raises:
        InputError: some are set but not all, or one is not a number in its range.
    """
    found = {name: environ[name] for name in _NAMES if environ.get(name)}
    if not found:
        return None
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise InputError(f"{', '.join(found)} set but not {', '.join(missing)}; set all three or none")
    count, process = (_number(name, found[name]) for name in _NAMES[1:])
    if not 0 <= process < count:
        raise InputError(f"JAX_PROCESS_ID={process}: expected 0 to {count - 1}, for JAX_NUM_PROCESSES={count}")
    return Job(found[_NAMES[0]], count, process)


def join(job: Job | None) -> None:
    """Join the job's processes, once, before anything asks for devices. Without a job, nothing happens."""
    if job is None or jax.distributed.is_initialized():
        return
    host = job.coordinator.rpartition(":")[0]
    bind = job.coordinator if host in ("127.0.0.1", "localhost") and job.process_id == 0 else None
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=_TIMEOUT_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_TIMEOUT_SECONDS,
        coordinator_bind_address=bind,
    )


def simulate_cpu_devices(count: int) -> None:
    """Make this process see `count` devices on its CPU, and no other.

    Raises:
        InputError: JAX has already started with another number of devices.
    """
    if count < 1:
        raise InputError(f"parallel.cpu_devices={count}: expected at least 1")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.local_device_count() != count:
            raise InputError(
                f"parallel.cpu_devices={count}: JAX already runs with {jax.local_device_count()} devices here; "
                "ask for them before the first computation"
            ) from error


def exchange(name: str, value: str) -> list[str]:
    """Every process's value, in order of the processes; needs no device. All must ask for the same."""
    if jax.process_count() == 1:
        return [value]
    from jax._src import distributed

    client: Any = distributed.global_state.client
    # A key is written once, and a notebook may prepare the same training twice.
    prefix = f"jaxddp/{next(_exchanges)}/{name}"
    client.key_value_set(f"{prefix}/{jax.process_index()}", value)
    return [
        client.blocking_key_value_get(f"{prefix}/{process}", _TIMEOUT_SECONDS * 1000)
        for process in range(jax.process_count())
    ]


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise InputError(f"{name}={text!r}: expected a whole number")
    return int(text)
