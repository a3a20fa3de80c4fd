"""Variants of this project's step that take turns in one process, each beside the step as it is. Started by
`benchmarks/gpu.py`.

- 1x1 convolutions as products of matrices, which `jaxddp.models.convolution` has on CPUs alone;
- XLA's options that `jaxddp.engine.compiler_options` holds to be worth trying;
- a state that is not donated;
- images that lie on the device: one step in a dispatch, and several.
"""

import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from case import Task
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_case import all_images
from jaxddp_parts import Parts, make_parts

from jaxddp.data.source import stacked_columns
from jaxddp.engine.compiler_options import WORTH_TRYING, compiler_options
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.resident_steps import make_resident_steps
from jaxddp.engine.step import make_local_step, make_train_step
from jaxddp.errors import InputError
from jaxddp.measure.cost import compile_with_cost
from jaxddp.mesh import AXIS
from jaxddp.models import resnet
from jaxddp.models.convolution import convolve

BASE = "the step as it is"
LONGEST_CHUNK = 32
# In bfloat16 another order of additions is seen in the third digit.
LOSS_TOLERANCE = 0.02

Turn = Callable[[], float]


@dataclass(frozen=True)
class Variant:
    """A jitted program, the arguments that follow the state, how many steps it takes, and what must hold while it is
    traced."""

    make: Callable[[], Any]
    feed: tuple[Any, ...]
    steps: int = 1
    around: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


def main() -> None:
    task = Task.parse()
    parts = make_parts(task)
    turns: dict[str, Turn] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, variant in variants(task, parts):
        try:
            turns[name], figures[name] = prepared(variant, parts, task.steps)
        except (InputError, jax.errors.JaxRuntimeError) as error:
            figures[name] = {"refused": str(error).splitlines()[0]}
        print(name, figures[name], flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(task.turns):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            seconds[name].append(turns[name]())
    for name, found in seconds.items():
        figures[name] |= beside(found, seconds[BASE])
    check_losses(figures)
    task.out.write_text(json.dumps(figures))


def variants(task: Task, parts: Parts) -> Iterator[tuple[str, Variant]]:
    settings = (parts.objective, parts.setup.optimizer, parts.setup.topology)
    step, batch = functools.partial(make_train_step, *settings), (parts.batch,)
    yield BASE, Variant(step, batch)
    yield "1x1 as products", Variant(step, batch, around=patch.object(resnet, "convolve", by_products))
    for option in WORTH_TRYING["gpu"]:
        # Tried when it is made, so that one that is refused is noted and the others go on.
        yield option.word, Variant(functools.partial(with_option, step, option.word), batch)
    yield "state not donated", Variant(functools.partial(undonated, *settings), batch)
    topology, (images, labels) = parts.setup.topology, all_images(task)
    images = topology.replicate(images)
    for length in (1, min(LONGEST_CHUNK, task.steps)):
        columns = stacked_columns(labels, parts.setup.order, range(length), length)
        feed = (images, topology.place(columns), topology.replicate(np.int32(length)))
        make = functools.partial(make_resident_steps, *settings, length=length)
        yield f"on the device, {length} a dispatch", Variant(make, feed, length)


def prepared(variant: Variant, parts: Parts, steps: int) -> tuple[Turn, dict[str, Any]]:
    """A compiled variant's turn, in seconds a step over at least `steps`, and what is known before it runs."""
    state, begin = jax.tree.map(jnp.copy, parts.state), time.perf_counter()
    with variant.around:
        compiled, cost = compile_with_cost(variant.make(), state, *variant.feed)
    figures: dict[str, Any] = {"compile": time.perf_counter() - begin}
    if cost.memory is not None:
        figures["needed_bytes"] = cost.memory.needed
    state, sums = compiled(state, *variant.feed)
    figures["losses"] = [first_loss(sums)]
    if variant.steps == 1:
        # The same images once more: this loss is that of the parameters after an update.
        state, sums = compiled(state, *variant.feed)
        figures["losses"].append(first_loss(sums))

    def turn() -> float:
        nonlocal state
        dispatches = -(-steps // variant.steps)
        begin = time.perf_counter()
        for _ in range(dispatches):
            state, _ = compiled(state, *variant.feed)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / (dispatches * variant.steps)

    return turn, figures


def first_loss(sums: MetricSums) -> float:
    """The mean loss of a dispatch's first step."""
    return float(np.ravel(sums.values[..., 0, 0])[0] / np.ravel(sums.values[..., 0, 1])[0])


def by_products(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """`convolve`, but 1x1 kernels are products of matrices wherever it runs."""
    if kernel.shape[0] > 1:
        return convolve(images, kernel, stride, padding)
    return lax.dot_general(images[:, ::stride, ::stride], kernel[0, 0], (((3,), (0,)), ((), ())))


def with_option(step: Callable[..., Any], word: str) -> Any:
    return step(compiler_options=compiler_options([word]))


def undonated(objective: Any, optimizer: Any, topology: Any) -> Any:
    step = make_local_step(objective, optimizer, topology)
    return jax.jit(jax.shard_map(step, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P()))


def beside(found: list[float], base: list[float]) -> dict[str, Any]:
    """The speed as a multiple of the step's as it is."""
    return {
        "step": statistics.median(found),
        "ratio": statistics.median(base) / statistics.median(found),
        "ratio_of_each_round": [b / a for a, b in zip(found, base, strict=True)],
    }


def check_losses(figures: dict[str, dict[str, Any]]) -> None:
    """Raises where a variant computes something else, and so has won nothing."""
    for name, found in figures.items():
        losses = found.get("losses", [])
        np.testing.assert_allclose(losses, figures[BASE]["losses"][: len(losses)], rtol=LOSS_TOLERANCE, err_msg=name)


if __name__ == "__main__":
    main()
