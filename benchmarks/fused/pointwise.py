"""Counts the bytes that ResNet-50's 1x1 convolutions and their norms move on an H200: plain and fused.

    python benchmarks/fused/pointwise.py

Each convolution is compiled with its norms, ReLU and residual: as the network has them, and by `convolution.py`. The
bytes of the backward pass are the difference between a program of both passes and one of the forward pass. No GPU is
needed; `timing.py` times the operations on one. A kernel's bytes are those of its operands and its result, each moved
once; repeated reads by the programs of a fused kernel are not counted, because they may hit the cache. The three
shortcuts with a stride are excluded, because both ways leave them to the library.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, machine
from benchmarks.fused.convolution import Form, convolve_between_norms
from benchmarks.programs.counts import total_bytes
from benchmarks.programs.gpu_plugin import compiler_options, described_devices
from benchmarks.programs.schedule import read_schedule
from jaxddp.models.ops.batch_norm import BatchNorm, Pair
from jaxddp.models.resnet import ARCHITECTURES

IMAGE_SIZE, WIDTH, EXPANSION = 224, 64, 4
Operation = Callable[..., jax.Array]


class Pointwise(NamedTuple):
    """A 1x1 convolution; `place` names its position in the block."""

    place: str
    side: int
    depth: int
    features: int


def convolutions() -> Iterator[Pointwise]:
    """Yield the 1x1 convolutions of ResNet-50 without a stride."""
    side, depth = IMAGE_SIZE // 4, WIDTH
    for stage, blocks in enumerate(ARCHITECTURES["resnet50"].stage_sizes):
        narrow = WIDTH * 2**stage
        for block in range(blocks):
            yield Pointwise("first", side, depth, narrow)
            if stage > 0 and block == 0:
                side //= 2
            elif block == 0:
                yield Pointwise("shortcut", side, depth, EXPANSION * narrow)
            depth = EXPANSION * narrow
            yield Pointwise("last", side, narrow, depth)


def plain(
    x: jax.Array, kernel: jax.Array, after: Pair, before: Pair | None, residual: jax.Array | None, relu: bool
) -> jax.Array:
    if before is not None:
        x = _normalize(x, before, None, True)
    dimensions = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel.astype(x.dtype), (1, 1), "VALID", dimension_numbers=dimensions)
    return _normalize(y, after, residual, relu)


def _normalize(x: jax.Array, pair: Pair, residual: jax.Array | None, relu: bool) -> jax.Array:
    zeros = jnp.zeros_like(pair[0])
    variables = {"params": {"scale": pair[0], "bias": pair[1]}, "batch_stats": {"mean": zeros, "var": zeros}}
    module = BatchNorm(False, dtype=x.dtype)
    return module.apply(variables, x, residual, relu=relu, mutable=["batch_stats"])[0]


def fused(
    x: jax.Array, kernel: jax.Array, after: Pair, before: Pair | None, residual: jax.Array | None, relu: bool
) -> jax.Array:
    return convolve_between_norms(x, kernel, after, before, residual, form=Form(relu))[0]


def count_moved_bytes(operation: Operation, convolution: Pointwise, batch: int) -> tuple[float, float]:
    """Return the bytes per image of the forward and the backward pass."""
    (device,) = described_devices("1x1x1")
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda leaf: leaf.update(sharding=sharding), argument_shapes(convolution, batch))
    forward, both = passes(operation, convolution)
    forward_bytes, total_bytes_moved = program_bytes(forward, *shapes[1:]), program_bytes(both, *shapes)
    return forward_bytes / batch, (total_bytes_moved - forward_bytes) / batch


def argument_shapes(convolution: Pointwise, batch: int) -> tuple[Any, ...]:
    """Return the shapes of the result's gradient and of an operation's arguments."""
    place, side, depth, features = convolution
    images, array = (batch, side, side), jax.ShapeDtypeStruct
    result = array((*images, features), jnp.bfloat16)
    return (
        result,
        array((*images, depth), jnp.bfloat16),
        array((1, 1, depth, features), jnp.float32),
        (array((features,), jnp.float32),) * 2,
        (array((depth,), jnp.float32),) * 2 if place == "last" else None,
        result if place == "last" else None,
    )


def passes(operation: Operation, convolution: Pointwise) -> tuple[Operation, Operation]:
    """Return the forward pass, and both passes as a function of the result's gradient and the arguments."""

    def forward(*arguments: Any) -> jax.Array:
        return operation(*arguments, convolution.place != "shortcut")

    def both(gradient: jax.Array, *arguments: Any) -> Any:
        result, pull_back = jax.vjp(forward, *arguments)
        # In a network both passes are far apart, so they must not be fused here.
        gradient, result = lax.optimization_barrier((gradient, result))
        return result, pull_back(gradient)

    return forward, both


def program_bytes(function: Callable[..., Any], *shapes: Any) -> int:
    compiled: Any = jax.jit(function).trace(*shapes).lower().compile(compiler_options={**compiler_options()})
    (module,) = compiled.runtime_executable().hlo_modules()
    return total_bytes(read_schedule(module.as_serialized_hlo_module_proto()).kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="images a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/gpu_pointwise.json"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = [figures(each, count, options.batch) for each, count in Counter(convolutions()).items()]
    sums = {key: sum(row["count"] * row[key] for row in rows) for key in rows[0] if "_" in key}
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "batch": options.batch}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**report, "convolutions": rows, "sums": sums}, indent=2) + "\n")
    print(f"{'MB an image':<32}{'plain':>16}{'fused':>16}\n{'':<32}" + 2 * f"{'fwd':>8}{'bwd':>8}")
    for row in rows:
        print(_line("{place:<9} {side:>2} px {depth:>4} > {features:<4} x{count}".format(**row), row))
    print(_line("sum, with repetitions", sums), f"\n\nresults: {options.out}")


def figures(convolution: Pointwise, count: int, batch: int) -> Figures:
    results = {}
    for name, operation in (("plain", plain), ("fused", fused)):
        results[f"{name}_forward"], results[f"{name}_backward"] = count_moved_bytes(operation, convolution, batch)
    return convolution._asdict() | {"count": count} | results


def _line(head: str, row: Figures) -> str:
    return f"{head:<32}" + "".join(f"{value / 1e6:>8.2f}" for key, value in row.items() if "_" in key)


if __name__ == "__main__":
    main()
