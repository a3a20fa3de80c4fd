"""Variants of jaxddp's step:

- without the guard, with gradients that are not ravelled, with JAX's gradient of batch norm;
- 1x1 convolutions as matrix products, which `jaxddp.models.ops.convolution` uses on CPUs;
- XLA's convolution in place of the first convolution on blocks of pixels;
- the XLA options in `XLA_OPTIONS`;
- a state that is not donated;
- images resident on the device, with one or several steps in a call.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.jaxddp_parts import jitted_step, make_parts
from jaxddp.engine.compilation import compiler_options
from jaxddp.engine.gradients import Averaging
from jaxddp.engine.programs import TrainStep
from jaxddp.engine.state import TrainState
from jaxddp.mesh import AXIS
from jaxddp.models.adapt import adapt
from jaxddp.models.ops.convolution import convolve_on_gpu
from jaxddp.models.ops.layers import Operations
from jaxddp.setup.feed import LONGEST_CHUNK
from jaxddp.setup.run_setup import RunSetup


def as_matrix_product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute a convolution, with 1x1 kernels as matrix products on every platform."""
    if kernel.shape[0] == 1:
        return lax.dot_general(images[:, ::stride, ::stride], kernel[0, 0], (((3,), (0,)), ((), ())))
    return convolve_on_gpu(images, kernel, stride, padding)


BASE = "the step as it is"
# Earlier options that made the step slower are in benchmarks/RESULTS.md.
XLA_OPTIONS = (
    # A thread would load and store 16 bytes at once.
    "xla_gpu_experimental_max_unroll_factor=8",
    # Measures which number of elements a thread should compute.
    "xla_gpu_native_emitter_tune_unroll_factor_for_loops=true",
    # Choose the emitters of fusions, by their times or without.
    "xla_gpu_experimental_enable_fusion_autotuner=true",
    "xla_gpu_experimental_enable_fusion_block_level_rewriter=true",
    "xla_gpu_experimental_all_fusions_with_triton=true",
    "xla_gpu_experimental_enable_same_shape_multi_output_fusion=true",
    # Launches a kernel before the previous one ends.
    "xla_gpu_enable_pdl_launch=true",
    "xla_gpu_ftz=true",
)
UNGUARDED, SEPARATE, UNDONATED = "without the guard", "gradients not ravelled", "state not donated"
OPERATIONS = {
    "JAX's gradient of batch norm": {"custom_norm_gradient": False},
    "1x1 as products": {"convolution": as_matrix_product},
    "XLA's first convolution": {"convolution": None},
}
# Steps in a call; None means as many as a run takes in a call.
RESIDENT = {"on the device, one a dispatch": 1, "on the device, several a dispatch": None}
VARIANTS = (UNGUARDED, SEPARATE, *OPERATIONS, *XLA_OPTIONS, UNDONATED, *RESIDENT)


@dataclass(frozen=True)
class Variant:
    """A jitted program, its first state, its arguments after the state, and its number of steps."""

    program: Any
    state: TrainState
    feed: tuple[Any, ...]
    steps: int = 1


def variant_makers(task: Task) -> dict[str, Callable[[], Variant]]:
    """Return a function for each of `VARIANTS`, and for the unchanged step, that prepares it."""
    setup, batch = make_parts(task)
    steps: dict[str, Callable[[], Any]] = {BASE: functools.partial(jitted_step, setup)}
    steps |= {UNDONATED: functools.partial(undonated, setup), SEPARATE: functools.partial(separate, setup)}
    steps |= {option: functools.partial(with_option, setup, option) for option in XLA_OPTIONS}
    steps |= {name: functools.partial(with_operations, setup, changes) for name, changes in OPERATIONS.items()}

    def plain(step: Callable[[], Any]) -> Variant:
        return Variant(step(), setup.state, (batch, setup.key))

    def unguarded() -> Variant:
        other, _ = make_parts(task, max_bad_steps=0)
        return Variant(jitted_step(other), other.state, (batch, other.key))

    makers = {name: functools.partial(plain, step) for name, step in steps.items()}
    lengths = {name: length or min(LONGEST_CHUNK, task.steps) for name, length in RESIDENT.items()}
    return makers | {UNGUARDED: unguarded} | {n: functools.partial(resident, setup, lengths[n]) for n in RESIDENT}


def resident(setup: RunSetup, length: int) -> Variant:
    (chunk,) = setup.feed.resident_chunks([range(length)], setup.key)
    # As in a run whose images are on the devices.
    averaging = Averaging.of(setup.config.replace(data={"cache": "device"}), setup.topology)
    return Variant(step_with(setup, averaging, resident=True), setup.state, chunk.feed, length)


def with_operations(setup: RunSetup, changes: dict[str, Any]) -> Any:
    model: Any = setup.network
    operations = replace(model.module.operations or Operations(), **changes)
    return jitted_step(replace(setup, network=adapt(model.module.clone(operations=operations))))


def with_option(setup: RunSetup, word: str) -> Any:
    resources = replace(setup.resources, compiler_options=compiler_options([word]))
    return jitted_step(setup.changed(resources=resources))


def undonated(setup: RunSetup) -> Any:
    way = setup.way
    phases = replace(setup.phases, gradients=way.gradients, shares=way.shares)
    one_step = way.one_step(phases)
    return jax.jit(jax.shard_map(one_step, mesh=setup.topology.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P()))


def separate(setup: RunSetup) -> Any:
    return step_with(setup, replace(setup.way.gradients.averaging, ravels_alone=0))


def step_with(setup: RunSetup, averaging: Averaging, *, resident: bool = False) -> TrainStep:
    way = replace(setup.way, gradients=replace(setup.way.gradients, averaging=averaging))
    return way.step(setup.phases, resident=resident)
