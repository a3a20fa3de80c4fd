"""Predicts the time of a scheduled GPU program at the limits of an H200. It is a model, not a measurement.

A kernel takes the longer of its bytes at the memory's speed and its multiplications at the tensor cores' speed, plus
the time of a launch. A collective runs beside the kernels between its start and the wait for it, and costs
its remaining time. `benchmarks.programs.communication` models its time.

The constants:
- 4.8 TB/s and 989.5 TFLOP/s in bfloat16, from NVIDIA's data sheet of the H200. Assumptions: 90% and 60% of these are
  reached. On one H200, copies reached 89%, elementwise kernels of XLA 67%, and large matrix products 79%.
- 1.5 us for the launch of a kernel in a CUDA graph or behind a full queue: an assumption.
- The links of a DGX H200, as in `benchmarks.programs.communication`.
"""

from collections.abc import Sequence

from benchmarks.common.harness import Figures
from benchmarks.programs.communication import DGX_H200
from benchmarks.programs.counts import between
from benchmarks.programs.schedule import COLLECTIVE, Kernel, Schedule
from jaxddp.measure.cost import peak

DEVICE = "NVIDIA H200"
BYTES_A_SECOND = 0.9 * 4.8e12
SHARE_OF_PEAK = 0.6
LAUNCH_SECONDS = 1.5e-6


def predict(schedule: Schedule, images: int, num_gpus: int, precision: str) -> Figures:
    """Return the seconds of a step, and the images per second of all GPUs.

    Args:
        images: Images on one GPU.
        precision: Precision of the multiplications, "bfloat16" or "float32".
    """
    peak_flops = peak(DEVICE, precision)
    assert peak_flops is not None, precision
    flops_a_second = SHARE_OF_PEAK * peak_flops
    kernels = schedule.kernels

    def seconds(launched: Sequence[Kernel]) -> float:
        computing = (kernel for kernel in launched if kernel.kind != COLLECTIVE)
        return sum(max(k.num_bytes / BYTES_A_SECOND, k.flops / flops_a_second) + LAUNCH_SECONDS for k in computing)

    compute = seconds(kernels)
    collectives = [place for place, kernel in enumerate(kernels) if kernel.kind == COLLECTIVE]
    needed = {place: _communication(kernels[place], num_gpus) for place in collectives}
    exposed = sum(max(0.0, needed[place] - seconds(between(kernels, place))) for place in collectives)
    communication = sum(needed.values())
    return {
        "compute_seconds": compute,
        "launch_seconds": LAUNCH_SECONDS * (len(kernels) - len(collectives)),
        "communication_seconds": communication,
        "exposed_seconds": exposed,
        "overlap": 1 - exposed / communication if communication else 0.0,
        "images_per_second": num_gpus * images / (compute + exposed),
    }


def _communication(kernel: Kernel, num_gpus: int) -> float:
    """Return the seconds of an all-reduce, or of a reduce-scatter or all-gather."""
    seconds = DGX_H200.all_reduce if kernel.collective == "all-reduce" else DGX_H200.reduce_scatter
    return seconds(kernel.message, num_gpus)
