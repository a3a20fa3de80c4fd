"""Variants of jaxddp's step:

- the step without what `benchmarks/RESULTS.md` lists under "Programs for GPUs": without the guard, with gradients that
  are not ravelled, with JAX's gradient of batch norm, with Flax's max-pool;
- 1x1 convolutions as matrix products, which `jaxddp.models.ops.cpu_convolution` uses on CPUs;
- convolutions of few channels with a stride, such as the first one, on blocks of pixels as channels;
- the XLA options in `XLA_OPTIONS`;
- a state that is not donated;
- images resident on the device, with one or several steps in a call.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.jaxddp_parts import make_parts
from jaxddp.engine.buckets import Averaging
from jaxddp.engine.compiler_options import compiler_options
from jaxddp.engine.resident_steps import make_resident_steps
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import TrainStep, make_local_step, make_train_step
from jaxddp.mesh import AXIS
from jaxddp.models.adapt import adapt
from jaxddp.models.ops.operations import Operations, flax_max_pool
from jaxddp.setup.feed import LONGEST_CHUNK
from jaxddp.setup.run_setup import RunSetup

BASE = "the step as it is"
# There is no threshold for combining all-reduces, because gradients are in one buffer.
XLA_OPTIONS = (
    # Computes during the all-reduce.
    "xla_gpu_enable_latency_hiding_scheduler=true",
    # NCCL sends the large buffer without copying it.
    "xla_gpu_enable_nccl_user_buffers=true",
    # Launches hundreds of kernels, including convolutions and the all-reduce, as a few CUDA graphs.
    "xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONVOLUTION,COLLECTIVES",
    # Launches every kernel separately, in case graphs cost more than they save.
    "xla_gpu_enable_command_buffer=",
    # Fuses neighboring operations into convolutions.
    "xla_gpu_experimental_enable_conv_fusion=true",
)
UNGUARDED, SEPARATE, UNDONATED = "without the guard", "gradients not ravelled", "state not donated"
OPERATIONS = {
    "JAX's gradient of batch norm": {"custom_norm_gradient": False},
    "Flax's max-pool": {"max_pool": flax_max_pool},
    "1x1 as products": {"convolution": lambda *arguments: as_matrix_product(*arguments)},
    "blocks of pixels as channels": {"convolution": lambda *arguments: on_blocks(*arguments)},
}
# Steps in a call; None means as many as a run takes in a call.
RESIDENT = {"on the device, one a dispatch": 1, "on the device, several a dispatch": None}
VARIANTS = (UNGUARDED, SEPARATE, *OPERATIONS, *XLA_OPTIONS, UNDONATED, *RESIDENT)
FEW_CHANNELS = 4


@dataclass(frozen=True)
class Variant:
    """A function that returns a jitted program, its first state, its arguments after the state, its number of steps."""

    make: Callable[[], Any]
    state: TrainState
    feed: tuple[Any, ...]
    steps: int = 1


def make_variants(task: Task, names: Iterable[str]) -> dict[str, Variant]:
    """Return some of `VARIANTS`, after the unchanged step."""
    setup, batch = make_parts(task)
    unguarded, _ = make_parts(task, max_bad_steps=0)
    makes = {BASE: setup.step, UNGUARDED: unguarded.step, UNDONATED: functools.partial(undonated, setup)}
    makes[SEPARATE] = functools.partial(separate, setup)
    makes |= {option: functools.partial(with_option, setup, option) for option in XLA_OPTIONS}
    makes |= {name: functools.partial(with_operations, setup, changes) for name, changes in OPERATIONS.items()}
    states = {UNGUARDED: unguarded.state}
    variants = {name: Variant(make, states.get(name, setup.state), (batch,)) for name, make in makes.items()}
    for name, steps in RESIDENT.items():
        variants[name] = resident(setup, steps or min(LONGEST_CHUNK, task.steps))
    return {name: variants[name] for name in (BASE, *names)}


def resident(setup: RunSetup, length: int) -> Variant:
    (chunk,) = setup.feed.resident_chunks([range(length)], setup.key)
    # As in a run whose images are on the devices.
    averaging = Averaging.of(setup.recipe.config.replace(data={"cache": "device"}), setup.topology)
    make = functools.partial(make_resident_steps, local_step(setup, averaging), setup.topology)
    return Variant(make, setup.state, chunk.feed, length)


def with_operations(setup: RunSetup, changes: dict[str, Any]) -> Any:
    model: Any = setup.model
    operations = replace(Operations(), **changes)
    return replace(setup, model=adapt(model.module.clone(operations=operations))).step()


def as_matrix_product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute a convolution, with 1x1 kernels as matrix products on every platform."""
    if kernel.shape[0] == 1:
        return lax.dot_general(images[:, ::stride, ::stride], kernel[0, 0], (((3,), (0,)), ((), ())))
    return convolve(images, kernel, stride, padding)


def on_blocks(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute a convolution. If it has a stride and few channels, blocks of `stride` x `stride` pixels are channels."""
    batch, *sides, channels = images.shape
    if stride == 1 or channels > FEW_CHANNELS:
        return convolve(images, kernel, stride, padding)
    length = -(-kernel.shape[0] // stride)
    counts = [(side + 2 * padding - kernel.shape[0]) // stride + length for side in sides]
    margins = [(padding, count * stride - side - padding, 0) for count, side in zip(counts, sides, strict=True)]
    images = lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *margins, (0, 0, 0)])
    kernel = jnp.pad(kernel, [(0, length * stride - kernel.shape[0])] * 2 + [(0, 0)] * 2)
    blocks = images.reshape(batch, counts[0], stride, counts[1], stride, channels).transpose(0, 1, 3, 2, 4, 5)
    kernels = kernel.reshape(length, stride, length, stride, channels, -1).transpose(0, 2, 1, 3, 4, 5)
    depth = stride * stride * channels
    return convolve(blocks.reshape(batch, *counts, depth), kernels.reshape(length, length, depth, -1), 1, 0)


def convolve(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    margins, numbers = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(images, kernel, (stride, stride), margins, dimension_numbers=numbers)


def with_option(setup: RunSetup, word: str) -> Any:
    resources = replace(setup.resources, compiler_options=compiler_options([word]))
    return setup.changed(resources=resources).step()


def undonated(setup: RunSetup) -> Any:
    one_step = local_step(setup, setup.layout.gradients.averaging)
    return jax.jit(jax.shard_map(one_step, mesh=setup.topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P()))


def separate(setup: RunSetup) -> Any:
    averaging = replace(setup.layout.gradients.averaging, ravels_alone=0)
    return make_train_step(local_step(setup, averaging), setup.topology)


def local_step(setup: RunSetup, averaging: Averaging) -> TrainStep:
    recipe, gradients = setup.recipe, replace(setup.layout.gradients, averaging=averaging)
    settings = {"schedule": recipe.schedule, "parts": recipe.parts, "gradients": gradients}
    return make_local_step(setup.objective, recipe.optimizer, setup.topology, **settings)
