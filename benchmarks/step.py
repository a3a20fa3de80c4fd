"""What the loop costs beside the bare step, and what one collective a step saves between processes.

    python benchmarks/step.py
    python benchmarks/step.py --processes 1 --rounds 9

Two comparisons, each of contenders that take turns in the same processes:

- loop: `fit`, which gathers and places its batches, logs every ten steps and saves a checkpoint, beside the bare
  jitted step over batches that lie on the device already. Target: at least 0.97 of the bare step's images a second.
- collectives: on several processes of one device and one core each (gloo), the step of `jaxddp.engine.step` beside a
  plain one that averages gradients, batch statistics and figures leaf by leaf. Target: at least 3 times its speed.

Before anything is timed, both contenders must compute the same numbers. The network is a ResNet-18 with the small stem.
"""

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.config import Config, DataConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective, cross_entropy
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import TrainStep, make_train_step
from jaxddp.models.resnet import resnet
from jaxddp.parallel.environment import find_job, join
from jaxddp.parallel.topology import AXIS, Topology
from jaxddp.run.setup import RunSetup, prepare
from jaxddp.runtime.checkpoint import Checkpoints
from jaxddp.runtime.listeners.jsonl import JsonLines
from jaxddp.runtime.loop import fit
from jaxddp.runtime.plan import Plan
from jaxddp.runtime.records import RunStart

CLASSES, SIZE, WIDTH = 10, 32, 16
LOOP_BATCH, LOCAL_BATCH = 128, 32
LOOP_TARGET, COLLECTIVES_TARGET = 0.97, 3.0
GATE_STEPS = 3
CHILD_SECONDS = 1200

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="of the second comparison; 1 leaves it out")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=30, help="steps in a turn")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/step.json"))
    options = parser.parse_args()
    if find_job() is not None:
        print(json.dumps(compare_collectives(options.rounds, options.steps)))
        return
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    report["collectives"] = in_processes(options.processes, sys.argv[1:]) if options.processes > 1 else None
    report["loop"] = compare_loop(options.rounds, options.steps)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"figures: {options.out}\n\n{table(report)}")


# --- The two comparisons ---


def compare_loop(rounds: int, steps: int) -> Figures:
    """`fit` beside the bare step, in images a second."""
    setup = make_setup(Topology.create(1), LOOP_BATCH)
    objective = setup.objective(cross_entropy())
    step = make_train_step(objective, setup.optimizer, setup.topology)
    placed = list(setup.batches(0, steps))
    last: dict[str, TrainState] = {}

    def bare() -> float:
        state = copy(setup.state)
        begin = time.perf_counter()
        for batch in placed:
            state, _ = step(state, batch)
        last["bare step"] = jax.block_until_ready(state)
        return time.perf_counter() - begin

    def whole() -> float:
        with tempfile.TemporaryDirectory() as folder:
            state, checkpoints = copy(setup.state), Checkpoints(Path(folder) / "checkpoints")
            begin = time.perf_counter()
            last["fit"] = jax.block_until_ready(run_fit(step, state, setup, steps, Path(folder), checkpoints))
            seconds = time.perf_counter() - begin
            checkpoints.close()
        return seconds

    whole(), bare()
    jax.tree.map(np.testing.assert_array_equal, last["fit"], last["bare step"])
    return figures(alternate({"fit": whole, "bare step": bare}, rounds), LOOP_BATCH * steps, LOOP_TARGET)


def compare_collectives(rounds: int, steps: int) -> Figures:
    """One collective beside one for every leaf, in images a second over all of the job's processes."""
    join(find_job())
    topology = Topology.create()
    setup = make_setup(topology, LOCAL_BATCH * topology.num_devices)
    objective, batches = setup.objective(cross_entropy()), list(setup.batches(0, steps))
    makers = {"one collective": make_train_step, "leaf by leaf": make_plain_step}
    compiled: dict[str, Any] = {}
    for name, make in makers.items():
        lowered = jax.jit(make(objective, setup.optimizer, topology), donate_argnums=0).lower(setup.state, batches[0])
        compiled[name] = lowered.compile()
    check_losses({name: losses(step, setup.state, batches[:GATE_STEPS]) for name, step in compiled.items()})

    def turn(step: TrainStep) -> Callable[[], float]:
        def run() -> float:
            state = copy(setup.state)
            begin = time.perf_counter()
            for batch in batches:
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            return time.perf_counter() - begin

        return run

    seconds = alternate({name: turn(step) for name, step in compiled.items()}, rounds)
    result = figures(seconds, setup.order.batch_size * steps, COLLECTIVES_TARGET)
    return result | {"all_reduces": {name: count_all_reduces(step) for name, step in compiled.items()}}


def make_plain_step(objective: Objective, optimizer: optax.GradientTransformation, topology: Topology) -> TrainStep:
    """The step as it is first written: the gradient of the mean loss, and an average of every leaf."""

    def local_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        def mean_loss(params: Any) -> tuple[jax.Array, Any]:
            sums, model_state = objective(params, state.model_state, batch, train=True)
            return sums.values[0, 0] / sums.values[0, 1], (sums, model_state)

        params = lax.pcast(state.params, AXIS, to="varying")
        grads, (sums, model_state) = jax.grad(mean_loss, has_aux=True)(params)
        averaged = jax.tree.map(lambda leaf: lax.pmean(leaf, AXIS), (grads, model_state, sums))
        updates, opt_state = optimizer.update(averaged[0], state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, averaged[1], opt_state), averaged[2]

    return jax.shard_map(local_step, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())


# --- Their parts ---


def make_setup(topology: Topology, batch_size: int) -> RunSetup:
    """A network on random images; every process makes the same."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8 * batch_size, SIZE, SIZE, 3), np.uint8)
    labels = rng.integers(0, CLASSES, len(images))
    data = ArrayTable(images, labels, tuple(map(str, range(CLASSES))))
    network = resnet("resnet18", CLASSES, width=WIDTH, stem="small")
    return prepare(network, data, optax.sgd(0.01, 0.9), topology, batch_size=batch_size, data=DataConfig())


def run_fit(
    step: TrainStep, state: TrainState, setup: RunSetup, steps: int, folder: Path, checkpoints: Checkpoints
) -> TrainState:
    durations = {"train": {"duration": f"{steps} steps"}, "log": {"every": "10 steps"}, "checkpoint": {"every": "100%"}}
    durations["train"] |= {"batch_size": setup.order.batch_size}
    plan = Plan.of(Config().replace(**durations), len(setup.table))
    start = RunStart(0, steps, plan.batch_size, plan.num_examples, devices=1, processes=1)
    listeners = [JsonLines(folder)]
    return fit(step, state, setup.batches, plan=plan, start=start, checkpoints=checkpoints, listeners=listeners)


def copy(state: TrainState) -> TrainState:
    """A step consumes the state that it is given."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def losses(step: TrainStep, state: TrainState, batches: list[Batch]) -> list[float]:
    found, state = [], copy(state)
    for batch in batches:
        state, sums = step(state, batch)
        found.append(sums.means()["loss"])
    return found


def check_losses(found: Mapping[str, list[float]]) -> None:
    """Raises where contenders disagree: the faster of two that compute different things has won nothing."""
    first, *others = found.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5, err_msg=str(found))


def count_all_reduces(compiled: Any) -> int:
    """How many XLA left in the program, whatever it merged."""
    return len(re.findall(r"= \S.* all-reduce(?:-start)?\(", compiled.as_text()))


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn; who begins changes from round to round, so that a drift of the machine's favours nobody."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            seconds[name].append(contenders[name]())
    return seconds


def figures(seconds: Mapping[str, list[float]], images: int, target: float) -> Figures:
    """Medians over the rounds, and the first contender's speed as a multiple of the last's."""
    ours, other = seconds.values()
    return {
        "images_per_second": {name: images / statistics.median(turns) for name, turns in seconds.items()},
        "ratio": statistics.median(other) / statistics.median(ours),
        "ratio_of_each_round": [b / a for a, b in zip(ours, other, strict=True)],
        "target": target,
    }


def in_processes(count: int, arguments: list[str]) -> Figures:
    """Run this script once a process, each on a core of its own; the first one's figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cores = sorted(os.sched_getaffinity(0))
    children = []
    for process in range(count):
        job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(process)}
        command = ["taskset", "--cpu-list", str(cores[process % len(cores)]), sys.executable, __file__, *arguments]
        environ = {**os.environ, **job, "JAX_PLATFORMS": "cpu"}
        children.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [child.communicate(timeout=CHILD_SECONDS)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        sys.exit(f"the processes ended with {[child.returncode for child in children]}")
    return json.loads(outputs[0].splitlines()[-1]) | {"processes": count}


def machine() -> Figures:
    return {"jax": jax.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def table(report: Figures) -> str:
    lines = [f"{'comparison':<14}{'contender':<18}{'images/s':>10}{'all-reduces':>13}"]
    for comparison in ("loop", "collectives"):
        found = report[comparison] or {"images_per_second": {}}
        for name, speed in found["images_per_second"].items():
            reduces = found.get("all_reduces", {}).get(name, "")
            lines.append(f"{comparison:<14}{name:<18}{speed:>10.1f}{reduces:>13}")
        if "ratio" in found:
            low, high = min(found["ratio_of_each_round"]), max(found["ratio_of_each_round"])
            spread = f"rounds {low:.3f} to {high:.3f}, target at least {found['target']}"
            lines.append(f"{comparison:<14}{'ratio':<18}{found['ratio']:>10.3f}   ({spread})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
