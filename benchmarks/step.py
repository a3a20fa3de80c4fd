"""What the loop costs beside the bare step, what one collective a step saves, and how fast the step is beside others'.

    python benchmarks/step.py
    python benchmarks/step.py --processes 1 --rounds 9
    python benchmarks/step.py --against torch --torch PYTHON
    python benchmarks/step.py --against flax --cases resnet18-128px

Without `--against` two comparisons, each of contenders that take turns in the same processes:

- loop: `fit`, which gathers and places its batches, logs every ten steps and saves every ninety, beside the bare
  jitted step over batches that lie on the device already. Target: at least 0.97 of the bare step's images a second.
- collectives: on several processes of one device and one core each (gloo), the step of `jaxddp.engine.step` beside a
  plain one that averages gradients, batch statistics and figures leaf by leaf. Target: at least 3 times its speed.
  In the same turns, the step with gradients that travel in bfloat16 beside it.

With it, the whole step beside that of PyTorch, DistributedDataParallel over gloo (`--torch` names an interpreter that
has torch), or beside the usual step of Flax, which averages leaf by leaf: two processes of a core each that `jaxddp
launch` starts anew for every turn (and for Flax also one process with two devices), without the time to compile.

Before anything is timed, the contenders must compute the same numbers. Without `--against`, the network is a ResNet-18
with the small stem.
"""

import argparse
import functools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from against import CASES, compare_rival
from harness import Figures, alternate, check_losses, compare, in_processes, machine, table
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.api import prepare_training
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.duration import Cadence
from jaxddp.engine import step as engine_step
from jaxddp.engine.objective import Objective, cross_entropy
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import TrainStep, make_train_step
from jaxddp.experiment.setup import RunSetup
from jaxddp.job.environment import find_job
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.resnet import resnet
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.events import RunStart
from jaxddp.training.listeners.jsonl import JsonLines
from jaxddp.training.loop import Chunk, fit, single_steps
from jaxddp.training.plan import Plan

EXAMPLES, CLASSES, SIZE, WIDTH = 4096, 10, 32, 16
LOOP_BATCH, LOCAL_BATCH = 128, 32
LOOP_TARGET, COLLECTIVES_TARGET, HALVED_TARGET = 0.97, 3.0, 1.0
OURS, PLAIN, HALVED = "one collective", "leaf by leaf", "in bfloat16"
GATE_STEPS, LOG_STEPS = 3, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="of the second comparison; 1 leaves it out")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=30, help="steps in a turn; three times as many of the loop")
    parser.add_argument("--against", choices=["torch", "flax"], help="whose step to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="networks for --against")
    parser.add_argument("--torch", default=sys.executable, help="the Python interpreter that has torch")
    parser.add_argument("--out", type=Path, help="runs/benchmarks/step.json, or step-RIVAL.json")
    options = parser.parse_args()
    if find_job() is not None:
        print(json.dumps(compare_collectives(options.rounds, options.steps)))
        return
    out = options.out or Path(f"runs/benchmarks/step{f'-{options.against}' if options.against else ''}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "comparisons": {}}
    for name, found in compare_all(options):
        report["comparisons"][name] = found
        out.write_text(json.dumps(report, indent=2) + "\n")
    for name, found in report["comparisons"].items():
        for contender, reduces in found.get("all_reduces", {}).items():
            print(f"{name}, all-reduces of {contender}: {reduces}")
    print(f"figures: {out}\n\n{table(report['comparisons'])}")


def compare_all(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Every comparison that is asked for, as soon as it is there."""
    if options.against:
        yield from compare_rival(options.against, options.cases, options.rounds, options.steps, options.torch)
        return
    yield "loop", compare_loop(options.rounds, 3 * options.steps)
    if options.processes > 1:
        yield from in_processes(options.processes, [__file__, *sys.argv[1:]]).items()


# --- The two comparisons ---


def compare_loop(rounds: int, steps: int) -> Figures:
    """`fit` beside the bare step, in images a second."""
    setup = make_setup(1, LOOP_BATCH)
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
            last["fit"] = jax.block_until_ready(run_fit(step, state, setup, steps, checkpoints))
            seconds = time.perf_counter() - begin
            checkpoints.close()
        return seconds

    for contender in (whole, bare):
        contender()
    jax.tree.map(np.testing.assert_array_equal, last["fit"], last["bare step"])
    return compare(alternate({"fit": whole, "bare step": bare}, rounds), LOOP_BATCH * steps, LOOP_TARGET)


def compare_collectives(rounds: int, steps: int) -> dict[str, Figures]:
    """One collective beside one for every leaf, and beside itself in bfloat16: images a second over all processes."""
    setup = make_setup(None, LOCAL_BATCH)
    objective, batches = setup.objective(cross_entropy()), list(setup.batches(0, steps))
    makers = {OURS: make_train_step, PLAIN: make_plain_step, HALVED: make_halved_step}
    compiled: dict[str, Any] = {}
    reduces: dict[str, Figures] = {}
    for name, make in makers.items():
        step: Any = make(objective, setup.optimizer, setup.topology)
        lowered = step.lower(setup.state, batches[0])
        compiled[name] = lowered.compile()
        reduces[name] = all_reduces(lowered, compiled[name])
    found = {name: losses(step, setup.state, batches[:GATE_STEPS]) for name, step in compiled.items()}
    check_losses({name: found[name] for name in (OURS, PLAIN)}, 1e-5)
    check_losses({name: found[name] for name in (OURS, HALVED)}, 1e-2)

    def turn(step: TrainStep) -> float:
        state = copy(setup.state)
        begin = time.perf_counter()
        for batch in batches:
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    seconds = alternate({name: functools.partial(turn, step) for name, step in compiled.items()}, rounds)

    def beside(name: str, other: str, target: float) -> Figures:
        turns = {each: seconds[each] for each in (name, other)}
        figures = compare(turns, setup.order.batch_size * steps, target)
        return figures | {"all_reduces": {each: reduces[each] for each in turns}}

    return {"collectives": beside(OURS, PLAIN, COLLECTIVES_TARGET), "in bfloat16": beside(HALVED, OURS, HALVED_TARGET)}


def make_halved_step(*settings: Any) -> TrainStep:
    """The step, but its gradients travel as bfloat16, in a collective of their own."""
    average = engine_step._average

    def halved(tree: Any, num_devices: int) -> Any:
        grads, *others = tree
        small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), grads)
        means = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), average(small, num_devices), grads)
        return means, *average(others, num_devices)

    step = make_train_step(*settings)

    def halved_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        # Only while it is traced.
        with patch.object(engine_step, "_average", halved):
            return step(state, batch)

    return jax.jit(halved_step, donate_argnums=0)


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

    step = jax.shard_map(local_step, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(step, donate_argnums=0)


# --- Their parts ---


def make_setup(devices: int | None, local_batch: int) -> RunSetup:
    """A network on random images; every process makes the same."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (EXAMPLES, SIZE, SIZE, 3), np.uint8)
    table = ArrayTable(images, rng.integers(0, CLASSES, EXAMPLES), tuple(map(str, range(CLASSES))))
    network = resnet("resnet18", CLASSES, width=WIDTH, stem="small")
    return prepare_training(network, table, devices, optax.sgd(0.01, 0.9), local_batch)


def run_fit(step: TrainStep, state: TrainState, setup: RunSetup, steps: int, checkpoints: Checkpoints) -> TrainState:
    size = setup.order.batch_size
    plan = Plan(EXAMPLES, size, steps, log=Cadence(Fraction(LOG_STEPS * size), size))
    start = RunStart(0, steps, size, EXAMPLES, devices=1, processes=1)
    listeners = [JsonLines(checkpoints.directory.parent)]

    def chunks(done: int) -> Iterator[Chunk]:
        return single_steps(setup.batches(done, steps))

    return fit(step, state, chunks, plan=plan, start=start, checkpoints=checkpoints, listeners=listeners)


def copy(state: TrainState) -> TrainState:
    """A step consumes the state that it is given."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def losses(step: TrainStep, state: TrainState, batches: list[Batch]) -> list[float]:
    found, state = [], copy(state)
    for batch in batches:
        state, sums = step(state, batch)
        found.append(sums.means()["loss"])
    return found


def all_reduces(lowered: Any, compiled: Any) -> Figures:
    """As the program was written, as XLA merged them, how many buffers those carry (gloo sends one at a time), and of
    which dtypes.
    """
    found = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(([^)]*)\)", compiled.as_text())
    return {
        "written": lowered.as_text().count("stablehlo.all_reduce"),
        "merged": len(found),
        "buffers": sum(names.count("%") for _, names in found),
        "dtypes": sorted({dtype for shapes, _ in found for dtype in re.findall(r"(\w+)\[", shapes)}),
    }


if __name__ == "__main__":
    main()
