"""Times the step of two processes of which one has a third of a core, with equal slices and with `parallel.shares`.

    python benchmarks/processes/unequal.py --out FILE.json

Each process has one device, and a core of its own. Process 1 is in a control group with a third of its core's time. If
control groups (version 1) cannot be written, it shares its core with two busy programs instead. The contenders (equal
slices, "3,1" and "auto") alternate in the same two processes, and must first compute similar losses.

On one core, the script also times what the design costs: a step of one program and a step of two programs with the same
slice, and the gradient of a slice outside and inside a branch of `lax.switch`, which a design with one program would
need. If other programs run, start the script in a control group with a large `cpu.shares`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, check_losses, copy, machine, random_images, run_in_processes
from jaxddp.api import prepare_training, resnet
from jaxddp.data.arrays import ArrayTable
from jaxddp.engine.ways.unequal import Unequal
from jaxddp.job.environment import find_job
from jaxddp.setup.measured_shares import settle_shares
from jaxddp.setup.run_setup import RunSetup

SHARES = (None, "3,1", "auto")
CLASSES, SIZE, WIDTH, EXAMPLES, LOCAL_BATCH = 10, 32, 16, 1024, 64
GATE_STEPS, TURN_STEPS, BATCHES = 3, 4, (32, 128)
QUOTA_US, PERIOD_US = 3_333, 10_000
WEIGHT, BUSY_PROGRAMS = 262_144, 2
GROUP = Path("/sys/fs/cgroup/cpu") / f"jaxddp-benchmark-{os.getpid()}"
SLOWED = "JAXDDP_BENCHMARK_GROUP"
"""The variable with the control group of process 1; empty if busy programs slow it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/unequal.json"))
    options = parser.parse_args()
    if (job := find_job()) is not None:
        if job.process_id == 1 and (group := os.environ.get(SLOWED)):
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(time_contenders(options.rounds)))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    report["load at the start"] = os.getloadavg()
    with one_core():
        report["in a branch"] = time_branches(options.rounds)
        report["of two programs"] = {size: time_programs(options.rounds, size) for size in BATCHES}
    with slowed_core() as how:
        report["process 1 is slowed by"] = how
        report["steps"] = run_in_processes(2, [__file__, *sys.argv[1:]])
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {options.out}\n\n{text_of(report)}")


@contextmanager
def slowed_core() -> Iterator[str]:
    """Prepare to give process 1 a third of its core; yield how."""
    try:
        GROUP.mkdir()
        (GROUP / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (GROUP / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        # The group gets its quota although other programs run on the core.
        (GROUP / "cpu.shares").write_text(str(WEIGHT))
    except OSError:
        core, loop = sorted(os.sched_getaffinity(0))[1], [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(["taskset", "-c", str(core), *loop]) for _ in range(BUSY_PROGRAMS)]
        try:
            yield f"{BUSY_PROGRAMS} busy programs on its core"
        finally:
            for program in busy:
                program.kill()
        return
    os.environ[SLOWED] = str(GROUP)
    try:
        yield f"a control group with {QUOTA_US} of each {PERIOD_US} microseconds"
    finally:
        del os.environ[SLOWED]
        GROUP.rmdir()


def make_setup(shares: str | None, devices: int | None, batch_size: int = LOCAL_BATCH) -> RunSetup:
    table = ArrayTable(*random_images(EXAMPLES, SIZE, CLASSES), tuple(map(str, range(CLASSES))))
    network = resnet("resnet18", CLASSES, width=WIDTH, stem="small")
    return prepare_training(network, table, devices, optax.sgd(0.01, momentum=0.9), batch_size, shares=shares)


def time_contenders(rounds: int) -> Figures:
    """Alternate the contenders in this process and its peer; return the seconds of a step, and the sizes of slices."""
    setups = {str(shares): settle_shares(make_setup(shares, None)) for shares in SHARES}
    turns, losses = {}, {}
    for name, setup in setups.items():
        program, _ = setup.program()
        batches = list(setup.batches(0, GATE_STEPS + TURN_STEPS))
        turns[name], losses[name] = contender(program, setup, batches)
    # Batch norm normalizes the images of each slice, so the losses are not equal.
    check_losses(losses, 0.05)
    seconds = alternate(turns, rounds)
    return {
        name: {
            "slices": [rows.stop - rows.start for _, rows in setups[name].slices],
            "milliseconds": 1000 * statistics.median(times),
            "milliseconds of each turn": [1000 * each for each in times],
        }
        for name, times in seconds.items()
    }


def contender(program: Any, setup: RunSetup, batches: list[Any]) -> tuple[Callable[[], float], list[float]]:
    """Return a function that takes the steps of a turn and returns the seconds of a step, and the first losses."""
    state, losses = copy(setup.state), []
    for batch in batches[:GATE_STEPS]:
        state, sums = program(state, batch, setup.key)
        losses.append(sums.means()["loss"])

    def turn() -> float:
        state = copy(setup.state)
        begin = time.perf_counter()
        for batch in batches[GATE_STEPS:]:
            state, _ = program(state, batch, setup.key)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / TURN_STEPS

    return turn, losses


@contextmanager
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def time_programs(rounds: int, batch_size: int) -> Figures:
    """Time a step of one program and a step of two programs on one device, in milliseconds."""
    setup = make_setup(None, 1, batch_size)
    programs = {
        "one program": setup.program()[0],
        "two programs": Unequal.with_counts(setup.way, (batch_size,)).program(setup.phases),
    }
    batches = list(setup.batches(0, GATE_STEPS + TURN_STEPS))
    turns = {name: contender(program, setup, batches)[0] for name, program in programs.items()}
    return {name: 1000 * statistics.median(times) for name, times in alternate(turns, rounds).items()}


def time_branches(rounds: int) -> Figures:
    """Time the gradient of a slice in a branch of `lax.switch`, and outside."""
    setup = make_setup(None, 1)
    model, state, sizes = setup.network, setup.state, (3 * LOCAL_BATCH // 4, LOCAL_BATCH // 4)
    images = jax.random.normal(jax.random.key(0), (LOCAL_BATCH, SIZE, SIZE, 3))

    def gradient(params: Any, images: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits, _ = model.apply(params, state.model_state, images, train=True, key=None)
            return -jax.nn.log_softmax(logits)[:, 0].sum()

        return jax.grad(loss)(params)

    def switched(params: Any, number: jax.Array) -> Any:
        return lax.switch(number, [lambda size=size: gradient(params, images[:size]) for size in sizes])

    outside = jax.jit(lambda params: gradient(params, images[: sizes[0]])).lower(state.params).compile()
    inside = jax.jit(switched).lower(state.params, jnp.int32(0)).compile()

    def seconds(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begin

    calls = {"outside": lambda: outside(state.params), "in a branch": lambda: inside(state.params, jnp.int32(0))}
    times = alternate({name: lambda call=call: seconds(call) for name, call in calls.items()}, rounds + 1)
    # The first call allocates memory.
    return {name: 1000 * statistics.median(each[1:]) for name, each in times.items()}


def text_of(report: Figures) -> str:
    branch = report["in a branch"]
    lines = [
        f"process 1 has {report['process 1 is slowed by']}; load {report['load at the start'][0]:.1f}",
        f"{'shares':<10}{'slices':<14}{'ms a step':>10}{'of equal':>10}",
    ]
    equal = report["steps"]["None"]["milliseconds"]
    for name, figures in report["steps"].items():
        slices, ms = ", ".join(map(str, figures["slices"])), figures["milliseconds"]
        lines.append(f"{name:<10}{slices:<14}{ms:>10.0f}{ms / equal:>10.2f}")
    for size, step in report["of two programs"].items():
        lines.append(f"batch {size}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in step.items()))
    lines.append(f"gradient outside a branch {branch['outside']:.0f} ms, in a branch {branch['in a branch']:.0f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
