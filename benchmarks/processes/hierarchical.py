"""Compares one all-reduce over all devices with an all-reduce within each process and then between processes, on CPUs.

    python benchmarks/processes/hierarchical.py
    python benchmarks/processes/hierarchical.py --rate 1gbit

Two processes of four simulated devices each average a buffer over gloo. Three contenders alternate:

- flat: one all-reduce over all eight devices, as in a training step;
- slices: a reduce-scatter over the devices of a process, an all-reduce of each slice between the processes, and an
  all-gather over the devices of a process;
- sums: an all-reduce over the devices of a process, and an all-reduce between the processes, on each device.

With `--rate` the processes run in two network namespaces, and `tc` limits the link between them (Linux, root).
Otherwise they use the loopback interface.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, machine, result_of, run_in_processes
from benchmarks.faults.hosts import Cable, run
from jaxddp.config import ParallelConfig
from jaxddp.job.environment import find_job
from jaxddp.mesh import AXIS, Topology
from jaxddp.setup.resources import join_job

PROCESSES, DEVICES, PORT = 2, 4, 29517
SIZES = {"4 kB": 4_000, "1 MB": 1_000_000, "100 MB": 100_000_000}
WITHIN = [[process * DEVICES + device for device in range(DEVICES)] for process in range(PROCESSES)]
BETWEEN = [list(group) for group in zip(*WITHIN, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--rate", help="the speed of the link, such as 1gbit")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/hierarchical.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.rounds)))
        return
    script = [__file__, "--child", "--rounds", str(options.rounds)]
    slow = options.rate is not None
    seconds = run_on_slow_link(script, options.rate) if slow else run_in_processes(PROCESSES, script)
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "seconds": seconds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{table(seconds)}\n\nresults: {options.out}")


def run_on_slow_link(script: list[str], rate: str) -> Figures:
    """Run the processes in two network namespaces with a slow link. Return the last line of process 0."""
    with Cable() as cable:
        for host in cable.hosts:
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            run(["tc", "-n", host, "qdisc", "add", "dev", "cable", "root", *limit])
        children = []
        for process, host in enumerate(cable.hosts):
            job = {"JAX_COORDINATOR_ADDRESS": f"{cable.addresses[0]}:{PORT}", "JAX_NUM_PROCESSES": str(PROCESSES)}
            environ = {**os.environ, **job, "JAX_PROCESS_ID": str(process), "JAX_PLATFORMS": "cpu"}
            command = ["ip", "netns", "exec", host, sys.executable, *script]
            children.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        return result_of(children)


def measure(rounds: int) -> Figures:
    """Return the seconds of each turn, by size and contender."""
    parallel = ParallelConfig(cpu_devices=DEVICES)
    topology = Topology.create(None, join_job(find_job(), parallel))
    topology.connect()
    return {name: _measure_size(topology, size // 4 // DEVICES * DEVICES, rounds) for name, size in SIZES.items()}


def _measure_size(topology: Topology, size: int, rounds: int) -> Figures:
    local = np.arange(DEVICES * size, dtype=np.float32).reshape(DEVICES, size) % 7
    values = topology.place(local)
    contenders = {name: _turn(topology, reduce, values) for name, reduce in REDUCTIONS.items()}
    # All processes have the same values.
    expected = PROCESSES * local.sum(0)[None]
    for name, contender in contenders.items():
        np.testing.assert_array_equal(contender(True), expected, name)
    return alternate({name: _timed(contender) for name, contender in contenders.items()}, rounds)


def _turn(
    topology: Topology, reduce: Callable[[jax.Array], jax.Array], values: jax.Array
) -> Callable[[bool], np.ndarray]:
    one = lambda x: reduce(x[0])[None]  # noqa: E731
    on_devices = jax.shard_map(one, mesh=topology.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    program = jax.jit(on_devices)

    def turn(fetch: bool) -> np.ndarray:
        result = jax.block_until_ready(program(values))
        return np.asarray(result.addressable_shards[0].data) if fetch else np.empty(0)

    return turn


def _timed(contender: Callable[[bool], np.ndarray]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        contender(False)
        return time.perf_counter() - begin

    return timed


def _by_slices(buffer: jax.Array) -> jax.Array:
    slices = lax.psum_scatter(buffer, AXIS, axis_index_groups=WITHIN, tiled=True)
    return lax.all_gather(lax.psum(slices, AXIS, axis_index_groups=BETWEEN), AXIS, axis_index_groups=WITHIN, tiled=True)


REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "flat": lambda buffer: lax.psum(buffer, AXIS),
    "slices": _by_slices,
    "sums": lambda buffer: lax.psum(lax.psum(buffer, AXIS, axis_index_groups=WITHIN), AXIS, axis_index_groups=BETWEEN),
}


def table(seconds: Figures) -> str:
    """Format the median milliseconds of each contender, and its speed relative to the flat all-reduce."""
    lines = [f"{'bytes':<10}" + "".join(f"{name:>24}" for name in REDUCTIONS) + "   ms, speed (best turns)"]
    for size, turns in seconds.items():
        flat = turns["flat"]
        cells = [
            f"{1000 * statistics.median(each):.2f} {statistics.median(flat) / statistics.median(each):.2f}"
            f" ({min(flat) / min(each):.2f})"
            for each in turns.values()
        ]
        lines.append(f"{size:<10}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
