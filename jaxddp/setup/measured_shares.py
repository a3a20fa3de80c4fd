"""Measures the speed of each device, and divides the batches by speed: `parallel.shares` "auto".

Each device computes the gradient of the slice that it would get if the slices were equal. All devices compute at the
same time, as in a step, but without communication. The input is random, so the speed does not include the reading of
images. Process 0 decides from the speeds of all devices, so all processes use the same sizes.
"""

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxddp.core.phases import moved, phase
from jaxddp.data.batch import Batch
from jaxddp.engine.unequal.device_groups import device_arrays
from jaxddp.engine.unequal.unequal_step import UnequalStep
from jaxddp.mesh import Device, Topology
from jaxddp.setup.compiled_programs import unequal_program
from jaxddp.setup.run_setup import RunSetup
from jaxddp.shares import AUTO, Shares

SIMILAR = 0.1
"""Speeds that differ by at most this fraction count as equal: equal slices need one program and no padding."""
_LEAST_SECONDS, _MOST_SECONDS = 2.0, 30.0
_LEAST_TIMES = 3


def measure_shares(setup: RunSetup) -> tuple[float, ...]:
    """Return the images a second of each device of all processes, in mesh order. All processes must call it together.

    The measurement takes at least two seconds after compilation, and at most half a minute or a single gradient.
    """
    topology, config = setup.topology, setup.recipe.config
    unit = setup.division.unit_of_slice
    sizes = Shares().sizes(config.train.batch_size, topology.num_devices, topology.process_count, unit)
    with phase("compile", "measuring the speed of each device"):
        batch = random_batch(setup.feed.divided(sizes).abstract_batch(), topology)
        step = unequal_program(setup.objective, setup.experiment, sizes).prepare(setup.state, batch, setup.key)
        # The first gradient allocates memory. The processes begin together, so that processes that share a core or a
        # memory bus slow each other as they will in training.
        _seconds(step, setup, batch)
        topology.peers.exchange("ready to measure", "")
        times: list[list[float]] = []
        end, last = time.perf_counter() + _LEAST_SECONDS, time.perf_counter() + _MOST_SECONDS
        while (now := time.perf_counter()) < end or (len(times) < _LEAST_TIMES and now < last):
            times.append(_seconds(step, setup, batch))
            moved()
    local = set(topology.mesh.local_devices)
    own = [size for device, size in zip(topology.mesh.devices.flat, sizes, strict=True) if device in local]
    speeds = [size / statistics.median(each) for size, each in zip(own, zip(*times, strict=True), strict=True)]
    measured = topology.peers.exchange("speeds of devices", json.dumps(speeds))
    return tuple(speed for text in measured for speed in json.loads(text))


def shares_of(speeds: Sequence[float], processes: int, batch_size: int, unit: int = 1) -> str:
    """Return the value of `parallel.shares` for speeds: multiples of the lowest speed, with three digits.

    There is a number for each process if the devices of each process have similar speeds, and otherwise for each
    device. Similar speeds count as equal. A device that is too slow for a slice gets the smallest slice.

    Args:
        unit: the smallest slice.
    """
    groups = [speeds[at : at + len(speeds) // processes] for at in range(0, len(speeds), len(speeds) // processes)]
    if all(map(_are_similar, groups)):
        speeds, unit = [statistics.fmean(group) for group in groups], unit * len(groups[0])
    if _are_similar(speeds):
        return ",".join("1" for _ in speeds)
    least = unit / batch_size * sum(speeds)
    raised = [max(speed, least) for speed in speeds]
    return ",".join(f"{speed / min(raised):.3g}" for speed in raised)


def _are_similar(speeds: Sequence[float]) -> bool:
    return max(speeds) <= (1 + SIMILAR) * min(speeds)


def is_auto(setup: RunSetup) -> bool:
    """Return whether the speeds of a setup's devices are to be measured."""
    return setup.recipe.config.parallel.shares == AUTO and setup.topology.num_devices > 1


def with_shares(setup: RunSetup, shares: str) -> RunSetup:
    """Return the setup with another value of `parallel.shares`."""
    return setup.changed(config=setup.recipe.config.replace(parallel={"shares": shares}))


def random_batch(shapes: Batch, topology: Topology) -> Batch:
    """Return a placed batch of random pixels with these shapes, without padding, with label 0 for all examples.

    Normalized images, float32, are normal numbers.
    """
    process, processes = topology.process_index, topology.process_count

    def fill(name: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        local = shape.shape[0] // processes, *shape.shape[1:]
        if name == "image":
            random = np.random.default_rng(process)
            if np.issubdtype(shape.dtype, np.floating):
                return random.standard_normal(local, shape.dtype)
            return random.integers(0, np.iinfo(shape.dtype).max, local, shape.dtype)
        return np.full(local, name == "mask", shape.dtype)

    columns = {
        name: random_batch(value, topology) if isinstance(value, Batch) else topology.place(fill(name, value))
        for name, value in shapes._asdict().items()
        if hasattr(value, "shape") or isinstance(value, Batch)
    }
    return shapes._replace(**columns)


def _seconds(step: UnequalStep, setup: RunSetup, batch: Batch) -> list[float]:
    """Compute a gradient on all devices of this process at the same time; return the seconds of each device."""
    begin = time.perf_counter()
    leaves = jax.tree.leaves(step.compute(setup.state, batch, setup.key))

    def wait(device: Device) -> float:
        jax.block_until_ready([shard for leaf in leaves for shard in device_arrays(leaf) if device in shard.devices()])
        return time.perf_counter() - begin

    devices = setup.topology.mesh.local_devices
    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(wait, devices))
