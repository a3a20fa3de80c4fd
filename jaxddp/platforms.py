"""The choices that depend on the platform: dtype, operations, averaging of gradients, and XLA options.

Each choice follows from a count or a time on its platform: benchmarks/RESULTS.md has them. The counts come from
`benchmarks/gpu_program.py` and `benchmarks/tpu_program.py`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxddp.models.ops.convolution import conv_general_dilated, convolve_on_cpu, convolve_on_gpu
from jaxddp.models.ops.layers import Operations, flax_max_pool


@dataclass(frozen=True)
class Platform:
    """The choices of one platform.

    Attributes:
        precision: the default of `train.precision`.
        float32_products: the dtype whose precision products of float32 arrays have by default.
        operations: the implementations of a network's operations.
        buckets: the default of `parallel.buckets`. On GPUs it was counted in programs compiled for one and two hosts.
        ravels: whether the gradients of a bucket are averaged as one array. Otherwise each gradient is an operand of
            its own, and XLA combines the all-reduces.
        ravels_alone: the largest number of elements of the gradients that a single device ravels. On a GPU this saves a
            quarter of the kernels of a ResNet-50's step.
        uses_cpu_compiler: whether XLA's CPU compiler is used. It runs convolutions slowly inside loops, and removes
            barriers.
        reproducible_options: the XLA options of a step with `parallel.reproducible`.
        overlap_options: the XLA options of a step that averages several buckets.
        single_use_options: the XLA options of a program that runs once.
        unoptimized_options: the XLA options of a program that runs once on little data.
    """

    precision: str = "bfloat16"
    float32_products: str = "float32"
    operations: Operations = field(default_factory=Operations)
    buckets: int = 1
    ravels: bool = True
    ravels_alone: int = 0
    uses_cpu_compiler: bool = False
    reproducible_options: Mapping[str, str] = field(default_factory=dict)
    overlap_options: Mapping[str, str] = field(default_factory=dict)
    single_use_options: Mapping[str, str] = field(default_factory=dict)
    unoptimized_options: Mapping[str, str] = field(default_factory=dict)


PLATFORMS = {
    "cpu": Platform(
        precision="float32",
        # JAX's derived gradient of a batch norm is faster than the custom one, and products of matrices are faster than
        # XLA's gradients of kernels.
        operations=Operations(convolve_on_cpu, conv_general_dilated, custom_norm_gradient=False),
        # Communication over gloo cannot overlap with computation, so one message is fastest.
        buckets=1,
        uses_cpu_compiler=True,
        # Optimization level 1 halves the compile time, and level 0 without LLVM's expensive passes divides it by five.
        single_use_options={"xla_backend_optimization_level": "1"},
        unoptimized_options={"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "True"},
    ),
    "gpu": Platform(
        operations=Operations(convolve_on_gpu),
        # TensorFloat-32 has as many bits of mantissa as float16.
        float32_products="float16",
        # With seven buckets all communication of a ResNet-50 overlaps with computation.
        buckets=7,
        ravels_alone=sys.maxsize,
        # Without this option XLA chooses algorithms by their measured time, and the order of additions varies.
        reproducible_options={"xla_gpu_deterministic_ops": "True"},
        # This option schedules computation between the start and the end of an all-reduce. It is the default in jaxlib
        # 0.10.2.
        overlap_options={"xla_gpu_enable_latency_hiding_scheduler": "True"},
    ),
    "tpu": Platform(
        float32_products="bfloat16",
        # XLA's TPU compiler fuses Flax's max pooling and the derived gradient of a batch norm into fewer and smaller
        # fusions than the operations for GPUs.
        operations=Operations(max_pool=flax_max_pool, custom_norm_gradient=False),
        # XLA combines the all-reduces without a copy. If the gradients are ravelled, XLA fuses all of them into one
        # array, and the compilation takes several times as long and four times the memory.
        ravels=False,
    ),
}
_OTHER = Platform()


def platform_named(name: str) -> Platform:
    """Return the choices of a platform by JAX's name, such as "cpu", "gpu" or "tpu"."""
    return PLATFORMS.get(name, _OTHER)
