"""The number of all-reduces with which a step would end first, by a model of their time and of the backward pass.

The model is not measured, and no run uses it:

- A bucket has half of the remaining bytes, as in `jaxddp.engine.gradients.fill_buckets`. Its all-reduce takes the time
  of `benchmarks.programs.communication`.
- All-reduces start in the last `WINDOW` of the computation of a step, at equal intervals, and the last one at its end.
  Each waits for the previous one, and with it the computation: an interval hides only the all-reduce that starts with
  it. Compiled programs of ResNet-50 are like this (benchmarks/RESULTS.md): XLA computes the gradients of most
  activations before the first all-reduce, and waits for an all-reduce before it starts the next one.
- The computation takes the time of its FLOPs at `SHARE_OF_PEAK` of the peak rate, and `SECONDS_OF_AN_ARRAY` for each
  parameter, whatever the number of images. The FLOPs are three times those of a forward pass, because a backward pass
  computes two products for each product of the forward pass.
- Each bucket adds kernels, and several buckets also add copies of the parameters; see `Averaging.parameters`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.measure.cost import count_flops, peak
from jaxddp.models.interface import Model

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
    images = jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32)
    forward = jax.make_jaxpr(lambda *arrays: model.apply(*arrays, train=False, key=None))(params, model_state, images)
    seconds = SECONDS_OF_AN_ARRAY * len(jax.tree.leaves(params))
    for dtype, flops in count_flops(forward.jaxpr).items():
        peak_rate = peak(device_kind, dtype)
        if peak_rate is None:
            return None
        seconds += 3 * shape[0] * flops / (SHARE_OF_PEAK * peak_rate)
    return seconds
