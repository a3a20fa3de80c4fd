"""The mesh of a run's devices, and the placement of host arrays on it."""

import logging
import numbers
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P, lax
from jax.sharding import AxisType, Mesh

from jaxddp.core.errors import InputError, Key, Words, counted
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.tpu import readable_start_errors

AXIS = "data"
"""The axis of the mesh over whose devices gradients are averaged in each step."""
GROUP = "group"
"""The first axis of the mesh of `Groups`. Other meshes do not have it."""

_log = logging.getLogger("jaxddp.mesh")
_THREADS = 8
"""The number of XLA threads in a reproducible run, which has at most as many devices."""

Device: TypeAlias = Any
"""A `jax.Device`. Type checkers do not accept the name `jax.Device` as a type."""


@dataclass(frozen=True)
class Topology:
    """The mesh of a run. Its only axis, "data", orders devices by process, so a process holds one slice of each batch.

    Attributes:
        mesh: the devices.
        peers: the processes that train on it.
    """

    mesh: Mesh
    peers: Peers = ALONE

    @classmethod
    def create(cls, devices: int | Iterable[Device] | None = None, peers: Peers = ALONE) -> "Topology":
        """Return the topology of some devices of all processes.

        Args:
            devices: a number of devices, the same number on every process; the devices; or None for all.
            peers: the processes that train on them.

        Raises:
            InputError: `devices` has another type, no devices, more devices than exist, a device twice, or unequal
                numbers of devices for the processes; or some devices belong to other processes, and `peers` has
                only this process; or JAX does not start on this machine's devices, or numbers the processes otherwise.
            Unreachable: JAX does not start on the TPU, because another host does not answer.
        """
        if devices is None or (isinstance(devices, numbers.Integral) and not isinstance(devices, bool)):
            devices = _first(devices if devices is None else int(devices), peers)
        device_list: list[Any] = list(devices) if isinstance(devices, Iterable) else []
        if not device_list or not all(hasattr(device, "process_index") for device in device_list):
            advice = ": give a number of devices, a list of them, or None for all"
            raise InputError(Key("devices", devices), advice)
        if repeated := [device for device, count in Counter(device_list).items() if count > 1]:
            raise InputError(Key("devices"), f": {repeated[0]} is given twice", advice="give each device once")
        ordered = sorted(device_list, key=lambda d: (d.process_index, d.id))
        counts = Counter(device.process_index for device in ordered)
        # A single process may compile a program for the devices of several processes, without running it.
        if len(counts) > 1 and peers.is_alone and jax.process_count() > 1:
            problem = f"devices: they belong to {len(counts)} processes, but `peers` has only this process"
            raise InputError(problem, advice="give Topology.create the peers that join returned")
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] != counts[least]:
            # A batch is divided into equal parts, one for each process.
            unequal = f"process {most} has {counted(counts[most], 'device')} and process {least} has {counts[least]}"
            raise InputError(f"devices: {unequal}; use the same number of devices in every process")
        return cls(Mesh(np.array(ordered), (AXIS,), axis_types=(AxisType.Auto,)), peers)

    @property
    def num_devices(self) -> int:
        """The number of devices of all processes."""
        return self.mesh.size

    @property
    def device_kind(self) -> str:
        """The model of the devices, such as "cpu" or "NVIDIA H200"."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def platform(self) -> str:
        """JAX's platform name of the devices, such as "cpu" or "gpu"."""
        return self.mesh.devices.flat[0].platform

    def free_memory(self) -> int | None:
        """Return the bytes that JAX can still allocate on the fullest device of this process; None if unknown."""
        stats = [device.memory_stats() or {} for device in self.mesh.local_devices]
        # An allocator without a limit reports 0.
        if not all(each.get("bytes_limit") for each in stats):
            return None
        return min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)

    def peak_memory(self) -> int | None:
        """Return the peak bytes in use on the fullest device of this process; None if unknown.

        On a CPU, it is the peak resident memory of the whole process.
        """
        if self.platform == "cpu":
            # ru_maxrss is in kilobytes, except on macOS.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak
        stats = [device.memory_stats() or {} for device in self.mesh.local_devices]
        return max((each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each), default=None)

    def connect(self) -> None:
        """Run a first collective over all processes, before any process compiles for long.

        gloo waits only 30 s for the other processes in the first collective. A process that finds its program in the
        compilation cache may be minutes ahead of one that compiles it.
        """
        if not self.peers.is_alone:
            ones = self.place(np.ones(len(self.mesh.local_devices), np.float32))
            jax.block_until_ready(jax.jit(jnp.sum, out_shardings=self.replicated)(ones))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds."""
        return NamedSharding(self.mesh, P())

    @property
    def sharded(self) -> NamedSharding:
        """The sharding of an array whose first axis is divided among the devices."""
        return NamedSharding(self.mesh, P(AXIS))

    def check_batch_size(self, batch_size: int, key: str = "train.batch_size") -> None:
        """Check that a global batch can be divided among the devices.

        Args:
            key: the config key that the error names.

        Raises:
            InputError: the batch cannot be divided. The message names other batches that can.
        """
        check_divisible(Key(key, batch_size), self.num_devices, counted(self.num_devices, "device"))

    def place(self, local_batch: Any) -> Any:
        """Make global arrays from this process's slice of a batch, NumPy arrays. The copy is asynchronous."""
        return jax.make_array_from_process_local_data(self.sharded, local_batch)

    def replicate(self, tree: Any) -> Any:
        """Copy a pytree to every device. All processes must hold equal values (see `jaxddp.core.peers.Peers.agree`)."""

        def put(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.jit(jax.random.wrap_key_data, out_shardings=self.replicated)(put(jax.random.key_data(x)))
            x = np.asarray(x)
            return jax.make_array_from_process_local_data(self.replicated, x, x.shape)

        return jax.tree.map(put, tree)

    def random_key(self, seed: int) -> jax.Array:
        """Return the random key of a seed, on every device."""
        with jax.transfer_guard("allow"):  # `key` copies the seed implicitly.
            return self.replicate(jax.random.key(seed))


def check_divisible(batch_size: Key, parts: int, *owners: Words) -> None:
    """Raise `InputError` if a batch cannot be divided into equal parts. The message suggests another size."""
    size = batch_size.value
    if size < 1 or size % parts:
        below = size // parts * parts
        fitting = " or ".join(str(each) for each in (below, below + parts) if each > 0)
        raise InputError(batch_size, " cannot be divided among ", *owners, advice=f"{fitting} would do")


def _first(count: int | None, peers: Peers) -> list[Device]:
    """Return the first devices of each process, `count` in total."""
    with readable_start_errors():
        available, processes = jax.devices(), jax.process_count()
    # A process may use some of its own devices alone, so the numbers are not compared for devices that are given.
    if available[0].platform == "tpu":
        _check_tpu_numbers(peers)
    if count is None:
        return available
    if count < 1 or count > len(available) or count % processes:
        shared = f", and a multiple of {processes} processes" if processes > 1 else ""
        raise InputError(Key("parallel.devices", count), f": expected 1 to {len(available)}{shared}")
    own = [[device for device in available if device.process_index == process] for process in range(processes)]
    return [device for devices in own for device in devices[: count // processes]]


def _check_tpu_numbers(peers: Peers) -> None:
    """Check that this process has the number that libtpu gives it, from the place of its host in the slices."""
    by_libtpu, by_job = (jax.process_index(), jax.process_count()), (peers.process_index, peers.process_count)
    if by_libtpu != by_job:
        problem = "libtpu numbers this process {} of {}, and the job {} of {}".format(*by_libtpu, *by_job)
        advice = "start one process on every TPU host, without JAX_PROCESS_ID and JAX_NUM_PROCESSES"
        raise InputError(problem, advice=advice)


def simulate_cpu_devices(count: int) -> None:
    """Give this process `count` devices on its CPU, and no other devices.

    Raises:
        InputError: JAX has already started with another number of devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.local_device_count() != count:
            key, running = Key("parallel.cpu_devices", count), counted(jax.local_device_count(), "device")
            advice = "set it before the first computation"
            raise InputError(key, f": JAX already runs with {running}", advice=advice) from error


def fix_cpu_threads() -> None:
    """Make XLA use the same number of threads on any CPU. Call it before JAX starts.

    Threads share some sums, such as the gradient of a convolution's kernel, so the last bits depend on the thread
    count. XLA uses as many threads as there are cores or devices, whichever are more, unless NPROC is set in the
    environment. If JAX has already started with another number, this logs a warning.
    """
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(_THREADS)
    if before != str(_THREADS) and _has_started() and jax.default_backend() == "cpu":
        _log.warning(
            "parallel.reproducible: JAX has already started with another number of threads, on which the last bits may "
            f"depend; set it before the first computation, or start Python with NPROC={_THREADS}"
        )


def _has_started() -> bool:
    """Return whether JAX has started. If it has, JAX rejects a change of the number of devices."""
    configured = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if configured == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", configured)
    return False


def without_mesh() -> AbstractContextManager[Any]:
    """Leave out the mesh of `jax.set_mesh` in a block, because a run has a mesh of its own."""
    is_set = not jax.sharding.get_abstract_mesh().empty
    return jax.set_mesh(Mesh(np.empty((), object), ())) if is_set else nullcontext()


def device_axes() -> str | tuple[str, str]:
    """Return the axes over all devices of the program. Call it inside `jax.shard_map`."""
    return (GROUP, AXIS) if GROUP in jax.sharding.get_abstract_mesh().axis_names else AXIS


def varying(tree: Any, axis: str = AXIS) -> Any:
    """Cast arrays inside of a `shard_map` to varying arrays, which may differ between devices along an axis."""
    is_varying = lambda leaf: axis in jax.typeof(leaf).manual_axis_type.varying  # noqa: E731
    return jax.tree.map(lambda leaf: leaf if is_varying(leaf) else lax.pcast(leaf, axis, to="varying"), tree)


def stack_over_devices(values: jax.Array) -> jax.Array:
    """Gather the values of all N devices of the program as [N, ...], replicated. Call it inside `jax.shard_map`.

    Each device fills its own slot and adds zeros to the other slots, so the sum changes no value; bools become int32.
    `shard_map`'s replication checker accepts this result as replicated, but not the result of `lax.all_gather`.
    """
    axes = device_axes()
    slots = jnp.zeros((lax.axis_size(axes), *values.shape), values.dtype)
    return lax.psum(slots.at[lax.axis_index(axes)].set(values), axes)
