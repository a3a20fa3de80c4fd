"""Decide in how many all-reduces the gradients are averaged, by a model of their time and of the backward pass.

A job of up to `Platform.counted_hosts` hosts uses the number that was counted in its compiled programs. The model
decides for larger jobs. It is not measured:

- A bucket has half of the remaining bytes, as in `jaxddp.engine.buckets.fill_buckets`. Its all-reduce takes the time of
  `jaxddp.measure.communication`.
- All-reduces start in the last `WINDOW` of the computation of a step, at equal intervals, and the last one at its end.
  Each waits for the previous one, and with it the computation: an interval hides only the all-reduce that starts with
  it. Compiled programs of ResNet-50 are like this (benchmarks/RESULTS.md): XLA computes the gradients of most
  activations before the first all-reduce, and waits for an all-reduce before it starts the next one.
- The computation takes the time of its FLOPs at `SHARE_OF_PEAK` of the peak rate, and `SECONDS_OF_AN_ARRAY` for each
  parameter, whatever the number of images. The FLOPs are three times those of a forward pass, because a backward pass
  computes two products for each product of the forward pass.
- Each bucket adds kernels, and several buckets also add copies of the parameters; see `Averaging.parameters`.

The best number is the one with which a step ends first. With microbatches all gradients are ready at the end of the
step, so one all-reduce is best.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import Config
from jaxddp.core.wording import counted, size
from jaxddp.engine.gradients import Gradients
from jaxddp.measure.communication import DGX_H200
from jaxddp.measure.cost import can_read_jaxprs, count_flops, peak
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.models.variables import without_frozen
from jaxddp.platforms import platform_named

WINDOW = 0.2
"""The fraction of a step's computation during which gradients become ready. In the program of ResNet-50 for two hosts,
19% of the bytes are moved after the start of the first all-reduce."""
SHARE_OF_PEAK = 0.25
"""With `SECONDS_OF_AN_ARRAY` the computation of a ResNet-50 takes 26.1, 7.7 and 4.7 ms for 256, 64 and 32 images on an
H200. In the roofline model it takes 26.8, 8.0 and 4.8 ms. NVIDIA's published speed on an A100, 2,470 images/s
(DeepLearningExamples, resnet50v1.5), is 19% of its peak."""
SECONDS_OF_AN_ARRAY = 10e-6
"""The launches of a layer's kernels and the update of its parameter."""
SECONDS_OF_A_BUCKET = 5e-6
"""The seconds that each further bucket adds to the computation of a step. From 2 to 7 buckets, the roofline model of
ResNet-50's programs grows from 26.819 to 26.844 ms."""
SECONDS_OF_A_BYTE = 1.5e-12
"""The seconds by which several buckets lengthen the computation, for each byte of the gradients. From 1 to 2 buckets,
the same model grows from 26.667 to 26.819 ms, with 102 MB of gradients."""

AllReduceSeconds = Callable[[float], float]
"""The seconds of an all-reduce of a number of bytes."""


@dataclass(frozen=True)
class BucketCount:
    """The largest number of all-reduces of a step, the reason for it, and whether the model decided it."""

    count: int
    reason: str
    by_model: bool = False

    def __str__(self) -> str:
        number = "1 all-reduce" if self.count == 1 else f"up to {self.count} all-reduces"
        return f"{number}: {self.reason}"


def decide(
    gradients: Gradients,
    config: Config,
    topology: Topology,
    model: Model,
    params: Any,
    model_state: Any,
    image_shape: tuple[int, int, int],
) -> BucketCount:
    """Decide the number of all-reduces of a step. The result is the same in every process.

    Args:
        gradients: the settings of the config, with the number of small jobs.
        params: the shapes and dtypes of the network's parameters.
        model_state: the shapes and dtypes of the network's state.
        image_shape: the shape of the network's input, [H, W, C].
    """
    # Only the devices of a group average gradients.
    devices, hosts = topology.num_devices // gradients.groups, -(-hosts_of(topology) // gradients.groups)
    most, reason = platform_named(topology.platform).buckets, _reason_of_small_job(config, topology, devices, hosts)
    if gradients.sizes:
        reason = "with slices of different sizes, gradients are complete before they are sent"
    if reason is not None:
        return BucketCount(gradients.averaging.buckets, reason)
    if config.train.accumulate > 1:
        return BucketCount(1, "all gradients are ready after the last microbatch", by_model=True)
    images = config.train.batch_size // topology.num_devices
    seconds = compute_seconds(model, params, model_state, (images, *image_shape), topology.device_kind)
    if seconds is None:
        reason = f"the speed of {topology.device_kind} is unknown, so the number is that of small jobs"
        return BucketCount(most, reason, by_model=True)
    num_bytes = gradient_bytes(config, params)
    arguments = num_bytes, WINDOW * seconds, _seconds_of_messages(gradients, devices, hosts)
    count = best_count(most, *arguments)
    added = [f"{1000 * exposed_seconds(number, *arguments):.2f} ms" for number in (count, most)]
    where = f"{counted(devices, 'device')} on {counted(hosts, 'host')}"
    comparison = "" if count == most else f", and {most} would add {added[1]}"
    reason = f"by the model, {size(num_bytes)} on {where} add {added[0]} to a step{comparison}"
    return BucketCount(count, reason, by_model=True)


def _seconds_of_messages(gradients: Gradients, devices: int, hosts: int) -> AllReduceSeconds:
    """Return the model of a bucket's time."""
    collective = DGX_H200.reduce_scatter if gradients.shards_state else DGX_H200.all_reduce
    return lambda num_bytes: collective(num_bytes, devices, hosts)


def _reason_of_small_job(config: Config, topology: Topology, devices: int, hosts: int) -> str | None:
    """Return the reason for the number of `Averaging.of`; None if the model decides."""
    platform = platform_named(topology.platform)
    if devices == 1:
        return "one device sends nothing"
    if config.parallel.reproducible:
        return "unused, because parallel.reproducible sums in a fixed order"
    if config.parallel.buckets is not None:
        return f"parallel.buckets is {config.parallel.buckets}"
    if platform.buckets == 1:
        return f"on the platform {topology.platform}, communication does not overlap with computation"
    if hosts <= platform.counted_hosts:
        return f"counted in the programs compiled for up to {counted(platform.counted_hosts, 'host')}"
    return None


def hosts_of(topology: Topology) -> int:
    """Return the number of machines of the devices, for GPUs.

    In a job, JAX gives the GPUs of a machine one `slice_index`, whatever the number of processes on this machine.
    Devices that are only described have a process for each machine.
    """
    devices = list(topology.mesh.devices.flat)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    described = len({device.process_index for device in devices}) if topology.process_count == 1 else 1
    return max(slices, described)


def gradient_bytes(config: Config, params: Any) -> int:
    """Return the bytes of the averaged gradients on each device."""
    dtype = config.train.gradient_precision
    leaves = jax.tree.leaves(without_frozen(params, config.frozen))
    return sum(leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in leaves)


def best_count(most: int, num_bytes: float, window: float, all_reduce: AllReduceSeconds) -> int:
    """Return the number of buckets, from 1 to `most`, with which a step ends first; see `exposed_seconds`."""
    return min(range(1, most + 1), key=lambda count: exposed_seconds(count, num_bytes, window, all_reduce))


def exposed_seconds(count: int, num_bytes: float, window: float, all_reduce: AllReduceSeconds) -> float:
    """Return the seconds that `count` all-reduces add to a step.

    Args:
        num_bytes: the bytes of all gradients.
        window: the seconds of computation after the start of the first all-reduce.
    """
    if count == 1:
        return all_reduce(num_bytes)
    hidden = window / (count - 1)
    waits = sum(max(0.0, all_reduce(num_bytes / 2**number) - hidden) for number in range(1, count))
    added = SECONDS_OF_A_BUCKET * count + SECONDS_OF_A_BYTE * num_bytes
    return waits + all_reduce(num_bytes / 2 ** (count - 1)) + added


def compute_seconds(
    model: Model, params: Any, model_state: Any, shape: tuple[int, int, int, int], device_kind: str
) -> float | None:
    """Return the seconds of a step's computation on a device for images [B, H, W, C]; None if they are unknown."""
    if not can_read_jaxprs():
        return None
    images = jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32)
    forward = jax.make_jaxpr(lambda *arrays: model.apply(*arrays, train=False, key=None))(params, model_state, images)
    seconds = SECONDS_OF_AN_ARRAY * len(jax.tree.leaves(params))
    for dtype, flops in count_flops(forward.jaxpr).items():
        peak_rate = peak(device_kind, dtype)
        if peak_rate is None:
            return None
        seconds += 3 * shape[0] * flops / (SHARE_OF_PEAK * peak_rate)
    return seconds
