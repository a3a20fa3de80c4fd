"""Compares a variant of jaxddp's step with the unchanged step; both alternate in one process.

`benchmarks/gpu.py` starts it for each of `VARIANTS`:

- the step without what `benchmarks/RESULTS.md` lists under "Programs for GPUs": without the guard, with gradients that
  are not ravelled, with JAX's gradient of batch norm, with Flax's max-pool;
- 1x1 convolutions as matrix products, which `jaxddp.models.ops.cpu_convolution` uses on CPUs;
- the XLA options in `XLA_OPTIONS`;
- a state that is not donated;
- images resident on the device, with one or several steps in a call.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.jaxddp_parts import make_parts
from benchmarks.rivals.contenders.outcome import add_result, attempt
from jaxddp.engine.buckets import Averaging
from jaxddp.engine.compiler_options import compiler_options
from jaxddp.engine.resident_steps import make_resident_steps
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import TrainStep, make_local_step, make_train_step
from jaxddp.engine.step_objective import MetricSums
from jaxddp.measure.cost import compile_with_cost
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
}
# Steps in a call; None means as many as a run takes in a call.
RESIDENT = {"on the device, one a dispatch": 1, "on the device, several a dispatch": None}
VARIANTS = (UNGUARDED, SEPARATE, *OPERATIONS, *XLA_OPTIONS, UNDONATED, *RESIDENT)
# In bfloat16 a different order of additions shows in the third digit.
LOSS_TOLERANCE = 0.02

Turn = Callable[[], float]


@dataclass(frozen=True)
class Variant:
    """A jitted program, its first state, its arguments after the state, and its number of steps."""

    make: Callable[[], Any]
    state: TrainState
    feed: tuple[Any, ...]
    steps: int = 1


def main(task: Task) -> None:
    turns: dict[str, Turn] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name in (BASE, task.variant or BASE):
        turns[name], figures[name] = compile_variant(make_variant(name, task), task)
    check_losses(figures)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(task.turns):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            seconds[name].append(turns[name]())
    name = task.variant or BASE
    add_result(task.out, figures[name] | compare_with_base(seconds[name], seconds[BASE]) | {"base": seconds[BASE]})


def make_variant(name: str, task: Task) -> Variant:
    """Return one of `VARIANTS`, or the unchanged step."""
    setup, batch = make_parts(task, **{"max_bad_steps": 0} if name == UNGUARDED else {})
    if name in RESIDENT:
        length = RESIDENT[name] or min(LONGEST_CHUNK, task.steps)
        (chunk,) = setup.feed.resident_chunks([range(length)], setup.key)
        # As in a run whose images are on the devices.
        averaging = Averaging.of(setup.recipe.config.replace(data={"cache": "device"}), setup.topology)
        make = functools.partial(make_resident_steps, local_step(setup, averaging), setup.topology)
        return Variant(make, setup.state, chunk.feed, length)
    makes = {BASE: setup.step, UNGUARDED: setup.step, UNDONATED: functools.partial(undonated, setup)}
    makes[SEPARATE] = functools.partial(separate, setup)
    makes |= {option: functools.partial(with_option, setup, option) for option in XLA_OPTIONS}
    makes |= {each: functools.partial(with_operations, setup, changes) for each, changes in OPERATIONS.items()}
    return Variant(makes[name], setup.state, (batch,))


def compile_variant(variant: Variant, task: Task) -> tuple[Turn, dict[str, Any]]:
    """Compile a variant. Returns a function that times a turn, in seconds per step, and the figures before it."""
    state, begin = jax.tree.map(jnp.copy, variant.state), time.perf_counter()
    compiled, cost = compile_with_cost(variant.make(), state, *variant.feed)
    figures: dict[str, Any] = {"compile": time.perf_counter() - begin}
    if cost.needed_bytes is not None:
        figures["needed_bytes"] = cost.needed_bytes
    state, sums = compiled(state, *variant.feed)
    figures["losses"] = [first_loss(sums)]
    if variant.steps == 1:
        # With the same images, the second loss is that of the updated parameters.
        state, sums = compiled(state, *variant.feed)
        figures["losses"].append(first_loss(sums))

    def turn() -> float:
        nonlocal state
        dispatches = -(-task.steps // variant.steps)
        begin = time.perf_counter()
        for _ in range(dispatches):
            state, _ = compiled(state, *variant.feed)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / (dispatches * variant.steps)

    for _ in range(-(-task.warmup // variant.steps)):
        state, _ = compiled(state, *variant.feed)
    return turn, figures


def first_loss(sums: MetricSums) -> float:
    """Return the mean loss of a call's first step."""
    return float(np.ravel(sums.values[..., 0, 0])[0] / np.ravel(sums.values[..., 0, 1])[0])


def with_operations(setup: RunSetup, changes: dict[str, Any]) -> Any:
    model: Any = setup.model
    operations = replace(Operations(), **changes)
    return replace(setup, model=adapt(model.module.clone(operations=operations))).step()


def as_matrix_product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute a convolution, with 1x1 kernels as matrix products on every platform."""
    if kernel.shape[0] == 1:
        return lax.dot_general(images[:, ::stride, ::stride], kernel[0, 0], (((3,), (0,)), ((), ())))
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


def compare_with_base(results: list[float], base: list[float]) -> dict[str, Any]:
    """Return the speed as a multiple of the unchanged step's."""
    return {
        "step": statistics.median(results),
        "ratio": statistics.median(base) / statistics.median(results),
        "ratio_of_each_round": [b / a for a, b in zip(results, base, strict=True)],
    }


def check_losses(figures: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError if a variant computes other losses than the unchanged step."""
    for name, results in figures.items():
        losses = results.get("losses", [])
        np.testing.assert_allclose(losses, figures[BASE]["losses"][: len(losses)], rtol=LOSS_TOLERANCE, err_msg=name)


if __name__ == "__main__":
    attempt(main, Task.parse())
