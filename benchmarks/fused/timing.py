"""Times ResNet-50's 1x1 convolutions with their norms on a GPU: plain and fused.

    python benchmarks/fused/timing.py

Each convolution is compiled as in `pointwise.py`: with its norms, ReLU and residual, forward and backward. Both ways
alternate, and each turn takes several calls. The results of the fused way are first compared with those of the plain
way, by the norm of their difference. `--batch 2` on a CPU checks only that; the kernels are then interpreted.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, machine
from benchmarks.fused.convolution import Form, convolve_between_norms
from benchmarks.fused.pointwise import Operation, Pointwise, argument_shapes, convolutions, passes, plain

THREADS = 8
"""Threads that compile. XLA measures its candidates in one thread at a time."""
TOLERANCE = 0.05
"""Largest relative difference of bfloat16 results and gradients."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="images")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--calls", type=int, default=10, help="calls in a turn")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/gpu_pointwise_times.json"))
    options = parser.parse_args()
    ways = {"plain": plain, "fused": functools.partial(fused, interpret=jax.default_backend() != "gpu")}
    found = Counter(convolutions())
    compiled = compile_all(ways, list(found), options.batch)
    print(f"{'ms, both passes':<40}{'plain':>10}{'fused':>10}{'ratio':>8}{'apart':>10}")
    rows: list[Figures] = []
    for convolution, count in found.items():
        arguments = draw(argument_shapes(convolution, options.batch))
        programs = {name: compiled[name, convolution] for name in ways}
        apart = difference(*(program(*arguments) for program in programs.values()))
        turns = {name: functools.partial(turn, program, arguments, options.calls) for name, program in programs.items()}
        seconds = {name: statistics.median(each) for name, each in alternate(turns, options.rounds).items()}
        row = convolution._asdict() | {"count": count, "apart": apart} | seconds
        rows.append(row)
        print(line("{place:<9} {side:>2} px {depth:>4} > {features:<4} x{count}".format(**row), row), flush=True)
    sums = {name: sum(row["count"] * row[name] for row in rows) for name in ways}
    print(line("sum, with repetitions", sums))
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "device": jax.devices()[0].device_kind}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**report, "batch": options.batch, "convolutions": rows, "sums": sums}) + "\n")
    print(f"\nresults: {options.out}")
    if wrong := [row for row in rows if not row["apart"] <= TOLERANCE]:
        sys.exit(f"timing.py: the results of {len(wrong)} convolutions differ by more than {TOLERANCE}")


def fused(*arguments: Any, interpret: bool) -> jax.Array:
    *arrays, relu = arguments
    return convolve_between_norms(*arrays, form=Form(relu, interpret=interpret))[0]


def compile_all(ways: dict[str, Operation], every: list[Pointwise], batch: int) -> dict[tuple[str, Pointwise], Any]:
    def program(name: str, convolution: Pointwise) -> Any:
        _, both = passes(ways[name], convolution)
        return jax.jit(both).lower(*argument_shapes(convolution, batch)).compile()

    keys = [(name, convolution) for name in ways for convolution in every]
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(keys, pool.map(lambda key: program(*key), keys), strict=True))


def draw(shapes: Any) -> Any:
    """Draw the arguments from the normal distribution, the kernel with a smaller deviation."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    scales = [leaf.shape[2] ** -0.5 if leaf.shape[:2] == (1, 1) else 1.0 for leaf in leaves]
    arrays = [s * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf, s in zip(keys, leaves, scales, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def difference(a: Any, b: Any) -> float:
    """Return the largest relative difference of two results, each by the norm of an array."""

    def apart(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(x.ravel())

    return float(np.max([apart(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]))


def turn(program: Any, arguments: Any, calls: int) -> float:
    """Return the seconds of a call."""
    begin, result = time.perf_counter(), None
    for _ in range(calls):
        result = program(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def line(head: str, row: Figures) -> str:
    apart = f"{row['apart']:>10.1e}" if "apart" in row else ""
    return f"{head:<40}{1e3 * row['plain']:>10.3f}{1e3 * row['fused']:>10.3f}{row['plain'] / row['fused']:>8.3f}{apart}"


if __name__ == "__main__":
    main()
