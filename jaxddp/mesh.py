"""The devices of a run as one mesh, and how host memory becomes arrays on it."""

import logging
import numbers
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import counted

AXIS = "data"

_log = logging.getLogger("jaxddp.mesh")
_THREADS = 8
"""As many as the most devices of a reproducible run."""

Device: TypeAlias = Any
"""A `jax.Device`; jax declares that name in a way that type checkers take for a variable."""


@dataclass(frozen=True)
class Topology:
    """The mesh: one axis, "data", of devices ordered by process, so that a process holds one slice of every batch.

    `peers` are the processes that train on it.
    """

    mesh: Mesh
    peers: Peers = ALONE

    @classmethod
    def create(cls, devices: int | Iterable[Device] | None = None, peers: Peers = ALONE) -> "Topology":
        """The mesh of some devices of all processes: so many, the same number on every process; or these; or all.

        Raises: InputError; something else, more devices than there are, one that is there twice, unequal shares of the
        processes that have any, or devices of others where this process is alone.
        """
        if devices is None or (isinstance(devices, numbers.Integral) and not isinstance(devices, bool)):
            devices = _first(devices if devices is None else int(devices))
        several: list[Any] = list(devices) if isinstance(devices, Iterable) else [None]
        if not all(hasattr(device, "process_index") for device in several):
            raise InputError(Key("devices", devices), ": give a number of devices, a list of them, or None for all")
        if not several:
            raise InputError(Key("devices", []), ": give at least one device")
        if twice := [device for device, count in Counter(several).items() if count > 1]:
            raise InputError(Key("devices"), f": {twice[0]} is there twice", advice="give each device once")
        ordered = sorted(several, key=lambda d: (d.process_index, d.id))
        counts = Counter(device.process_index for device in ordered)
        # What is only compiled may be for the devices of others.
        if len(counts) > 1 and peers.is_alone and jax.process_count() > 1:
            raise InputError(
                f"devices: they are those of {len(counts)} processes, and this one is alone; give Topology.create the "
                "peers that join returned"
            )
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] != counts[least]:
            # A batch is cut into equal parts, one for each process.
            raise InputError(
                f"devices: process {most} has {counted(counts[most], 'device')} and process {least} has "
                f"{counts[least]}; give each as many"
            )
        return cls(Mesh(np.array(ordered), (AXIS,), axis_types=(AxisType.Auto,)), peers)

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def process_index(self) -> int:
        return self.peers.process_index

    @property
    def process_count(self) -> int:
        return self.peers.process_count

    @property
    def device_kind(self) -> str:
        """What the devices are: "cpu", "NVIDIA H200"."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def platform(self) -> str:
        """JAX's name for their kind: "cpu", "gpu"."""
        return self.mesh.devices.flat[0].platform

    def free_memory(self) -> int | None:
        """Bytes that JAX may still take on the fullest device of this process; None where the backend does not say."""
        stats = [device.memory_stats() or {} for device in self.mesh.local_devices]
        # An allocator without a limit of its own says 0.
        if not all(each.get("bytes_limit") for each in stats):
            return None
        return min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)

    def peak_memory(self) -> int | None:
        """Bytes that the fullest device of this process has held at most; None where the backend does not say.

        On a CPU it is the most that the process has held, for whatever purpose.
        """
        if self.platform == "cpu":
            # Kilobytes, except on macOS.
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return held if sys.platform == "darwin" else 1024 * held
        stats = [device.memory_stats() or {} for device in self.mesh.local_devices]
        return max((each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each), default=None)

    def connect(self) -> None:
        """Sum once over the devices of all processes, before any process compiles for long.

        In the first collective gloo waits only 30 s for the others, and a process that finds its program in the
        compilation cache may be minutes ahead of one that compiles it.
        """
        if self.process_count > 1:
            ones = self.place(np.ones(len(self.mesh.local_devices), np.float32))
            jax.block_until_ready(jax.jit(jnp.sum, out_shardings=self.replicated)(ones))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def sharded(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(AXIS))

    def check_batch_size(self, batch_size: int, key: str = "train.batch_size") -> None:
        """Raises `InputError` where the global batch cannot be divided among the devices; says which sizes can."""
        if batch_size < 1 or batch_size % self.num_devices:
            below = batch_size // self.num_devices * self.num_devices
            near = " or ".join(str(size) for size in (below, below + self.num_devices) if size > 0)
            raise InputError(
                Key(key, batch_size),
                f" cannot be divided among {counted(self.num_devices, 'device')}",
                advice=f"{near} would do",
            )

    def slices(self, batch_size: int) -> list[tuple[Device, slice]]:
        """Which rows of a global batch each device gets, in mesh order."""
        size = batch_size // self.num_devices
        return [(device, slice(i * size, (i + 1) * size)) for i, device in enumerate(self.mesh.devices.flat)]

    def place(self, local_batch: Any) -> Any:
        """This process's slice of a batch, a pytree of NumPy arrays, becomes global arrays; copying is asynchronous."""
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.sharded, x), local_batch)

    def replicate(self, tree: Any) -> Any:
        """The same values on every device; every process must hold the same (see `jaxddp.core.peers.Peers.agree`)."""

        def put(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.jit(jax.random.wrap_key_data, out_shardings=self.replicated)(put(jax.random.key_data(x)))
            x = np.asarray(x)
            return jax.make_array_from_process_local_data(self.replicated, x, x.shape)

        return jax.tree.map(put, tree)


def _first(count: int | None) -> list[Device]:
    """The first devices of each process, `count` in all."""
    everything, processes = jax.devices(), jax.process_count()
    if count is None:
        return everything
    if count < 1 or count > len(everything) or count % processes:
        shared = f", and a multiple of {processes} processes" if processes > 1 else ""
        raise InputError(Key("parallel.devices", count), f": expected 1 to {len(everything)}{shared}")
    mine: list[Device] = []
    for process in range(processes):
        mine += [device for device in everything if device.process_index == process][: count // processes]
    return mine


def simulate_cpu_devices(count: int) -> None:
    """Make this process see `count` devices on its CPU, and no other. Raises: InputError; JAX runs with others."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.local_device_count() != count:
            raise InputError(
                Key("parallel.cpu_devices", count),
                f": JAX already runs with {counted(jax.local_device_count(), 'device')} here",
                advice="ask for them before the first computation",
            ) from error


def fix_cpu_threads() -> None:
    """Have XLA compute with as many threads on any CPU; to be called before JAX starts.

    The gradient of a convolution's kernel, for one, is a sum that the threads share, so its last bits depend on how
    many there are: as many as cores or devices, whichever are more, unless XLA finds NPROC in the environment. Where
    JAX has started without, a line says so.
    """
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(_THREADS)
    if before != str(_THREADS) and _has_started() and jax.default_backend() == "cpu":
        _log.warning(
            "parallel.reproducible: JAX runs already, with a number of threads of its own, on which the last bits may "
            f"depend; ask before its first computation, or start Python with NPROC={_THREADS}"
        )


def _has_started() -> bool:
    """Whether JAX has devices already: then it refuses another number of them, and says nothing of the same."""
    asked = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if asked == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", asked)
    return False


def varying(tree: Any) -> Any:
    """The same arrays inside of a `shard_map`, where each device may have others from here on."""
    is_varying = lambda leaf: AXIS in jax.typeof(leaf).manual_axis_type.varying  # noqa: E731
    return jax.tree.map(lambda leaf: leaf if is_varying(leaf) else lax.pcast(leaf, AXIS, to="varying"), tree)
