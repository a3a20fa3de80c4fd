"""Compares a run with its bare step, one collective with a collective per leaf, and the step with other trainers.

    python benchmarks/step.py
    python benchmarks/step.py --against torch --python PYTHON
    python benchmarks/step.py --against newest --python .venv-newest/bin/python
    python benchmarks/step.py --against flax --cases resnet18-128px

Without `--against` it makes these comparisons, each of contenders that alternate in the same processes:

- run: `jaxddp train` with display, loggers and checkpoints, against the jitted step over batches on the device; from
  the first logged step until the checkpoint is on disk, without validation. Target: at least 0.97 of the step's speed.
- loop: `fit` alone, which gathers and places the batches, against the same jitted step and with the same target.
- collectives: on several processes of one device and one core each (gloo), the step of `jaxddp.engine.step` against a
  plain step that averages leaf by leaf (target: 3 times its speed), and one with bfloat16 gradients in the all-reduce.

With `--against` it compares the whole step with PyTorch's DistributedDataParallel over gloo, with Flax's usual step, or
with jaxddp under newer libraries: `jaxddp launch` starts two processes of a core each for every turn (except for torch
also one with two devices). `--python` names the interpreter with torch or the newer libraries. Compile time is
excluded. The contenders must first compute the same losses.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.harness import (
    Figures,
    alternate,
    check_losses,
    compare,
    copy,
    machine,
    random_images,
    run_in_processes,
    table,
    take_steps,
    time_steps,
)
from benchmarks.rivals.against import CASES, compare_rival
from jaxddp.api import prepare_training, resnet
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.engine.programs import TrainStep
from jaxddp.engine.state import TrainState
from jaxddp.job.environment import find_job
from jaxddp.mesh import AXIS
from jaxddp.recipe.file import read_recipe
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import RunSetup, initialize, open_recipe
from jaxddp.setup.run_training import make_run, train
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd, StepRecord
from jaxddp.training.loop import fit
from jaxddp.training.progress import progress

EXAMPLES, VALIDATED, CLASSES, SIZE, WIDTH = 4096, 256, 10, 32, 16
LOOP_BATCH, LOCAL_BATCH = 128, 32
LOOP_TARGET, COLLECTIVES_TARGET, HALVED_TARGET = 0.97, 3.0, 1.0
OURS, PLAIN, HALVED = "one collective", "leaf by leaf", "in bfloat16"
GATE_STEPS, LOG_STEPS = 3, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--processes", type=int, default=2, help="processes in the comparison of collectives (1 skips it)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=30, help="steps in a turn; a run takes three times as many, or 20")
    parser.add_argument("--against", choices=["torch", "flax", "newest"], help="the trainer to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="networks for --against")
    parser.add_argument("--python", default=sys.executable, help="the Python interpreter of torch or newest")
    parser.add_argument("--out", type=Path, help="default: runs/benchmarks/step.json, or step-RIVAL.json")
    options = parser.parse_args()
    if find_job() is not None:
        print(json.dumps(compare_collectives(options.rounds, options.steps)))
        return
    out = options.out or Path(f"runs/benchmarks/step{f'-{options.against}' if options.against else ''}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "comparisons": {}}
    for name, figures in compare_all(options):
        report["comparisons"][name] = figures
        out.write_text(json.dumps(report, indent=2) + "\n")
    for name, figures in report["comparisons"].items():
        for contender, reduces in figures.get("all_reduces", {}).items():
            print(f"{name}, all-reduces of {contender}: {reduces}")
    print(f"results: {out}\n\n{table(report['comparisons'])}")


def compare_all(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Yield each requested comparison when it is measured."""
    if options.against:
        yield from compare_rival(options.against, options.cases, options.rounds, options.steps, options.python)
        return
    yield from compare_runs(options.rounds, max(3 * options.steps, 2 * LOG_STEPS)).items()
    if options.processes > 1:
        yield from run_in_processes(options.processes, [__file__, *sys.argv[1:]]).items()


# --- Comparisons ---


def compare_runs(rounds: int, steps: int) -> dict[str, Figures]:
    """Compare a run, and the loop alone, with the bare step, in images per second."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = make_experiment(Path(folder), steps)
        setup = initialize(experiment)
        step, placed = setup.step(), list(setup.batches(0, steps))
        bare_run = dataclasses.replace(make_run(setup), evaluator=None, predictor=None)

        def loop() -> TrainState:
            return fit(dataclasses.replace(bare_run, state=copy(setup.state)))

        def loop_turn() -> float:
            begin = time.perf_counter()
            jax.block_until_ready(loop())
            return time.perf_counter() - begin

        def run(watch: Stopwatch) -> TrainState | None:
            with tempfile.TemporaryDirectory() as workdir:
                return train(experiment, Path(workdir), listeners=[watch, progress()])

        def run_turn() -> float:
            watch = Stopwatch()
            run(watch)
            return watch.seconds_a_step * steps

        expected = take_steps(step, copy(setup.state), placed)
        for state in (loop(), run(Stopwatch())):
            jax.tree.map(np.testing.assert_array_equal, state, expected)
        turns = {"run": run_turn, "fit": loop_turn, "bare step": lambda: time_steps(step, setup.state, placed)}
        seconds = alternate(turns, rounds)

    def beside_bare(name: str) -> Figures:
        return compare({each: seconds[each] for each in (name, "bare step")}, LOOP_BATCH * steps, LOOP_TARGET)

    return {"run": beside_bare("run"), "loop": beside_bare("fit")}


def compare_collectives(rounds: int, steps: int) -> dict[str, Figures]:
    """Compare one collective with a collective per leaf, and with bfloat16, in images per second of all processes."""
    setup = make_setup()
    batches = list(setup.batches(0, steps))
    makers: dict[str, Callable[[RunSetup], Any]] = {
        OURS: RunSetup.step,
        PLAIN: make_plain_step,
        HALVED: make_halved_step,
    }
    compiled: dict[str, Any] = {}
    reduces: dict[str, Figures] = {}
    for name, make in makers.items():
        lowered = make(setup).lower(setup.state, batches[0])
        compiled[name] = lowered.compile()
        reduces[name] = all_reduces(lowered, compiled[name])
    figures = {name: losses(step, setup.state, batches[:GATE_STEPS]) for name, step in compiled.items()}
    check_losses({name: figures[name] for name in (OURS, PLAIN)}, 1e-5)
    check_losses({name: figures[name] for name in (OURS, HALVED)}, 1e-2)

    turns = {name: functools.partial(time_steps, step, setup.state, batches) for name, step in compiled.items()}
    seconds = alternate(turns, rounds)

    def beside(name: str, other: str, target: float) -> Figures:
        pair = {each: seconds[each] for each in (name, other)}
        figures = compare(pair, setup.feed.order.batch_size * steps, target)
        return figures | {"all_reduces": {each: reduces[each] for each in pair}}

    return {"collectives": beside(OURS, PLAIN, COLLECTIVES_TARGET), "in bfloat16": beside(HALVED, OURS, HALVED_TARGET)}


def make_halved_step(setup: RunSetup) -> TrainStep:
    """Return the step with its gradients averaged as bfloat16, in a separate collective."""
    config = setup.config.replace(train={"gradient_precision": "bfloat16"})
    return setup.changed(config=config).step()


def make_plain_step(setup: RunSetup) -> TrainStep:
    """Return a plain step: the gradient of the mean loss, and an average of every leaf."""

    def local_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        def mean_loss(params: Any) -> tuple[jax.Array, Any]:
            sums, model_state = setup.supervised(params, state.model_state, batch, train=True)
            return sums.values[0, 0] / sums.values[0, 1], (sums, model_state)

        params = lax.pcast(state.params, AXIS, to="varying")
        grads, (sums, model_state) = jax.grad(mean_loss, has_aux=True)(params)
        averaged = jax.tree.map(lambda leaf: lax.pmean(leaf, AXIS), (grads, model_state, sums))
        updates, opt_state = setup.optimizer.update(averaged[0], state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, averaged[1], opt_state), averaged[2]

    step = jax.shard_map(local_step, mesh=setup.topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(step, donate_argnums=0)


# --- Parts of the comparisons ---


class Stopwatch(Listener):
    """A listener that measures seconds per step, from the first logged step to the end, without validation."""

    def __init__(self) -> None:
        self._first: StepRecord | None = None
        self._begin = 0.0
        self._validating = 0.0
        self.seconds_a_step = float("nan")

    def step(self, record: StepRecord) -> None:
        if self._first is None:
            self._first, self._begin = record, time.perf_counter()

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self._validating += record.seconds

    def end(self, run: RunEnd) -> None:
        assert self._first is not None
        seconds = time.perf_counter() - self._begin - self._validating
        self.seconds_a_step = seconds / (run.step - self._first.step)


def make_experiment(folder: Path, steps: int) -> Recipe:
    """Open a small run of configs/cifar10.py on random images, which it writes into the folder."""
    images, labels = random_images(EXAMPLES + VALIDATED, SIZE, CLASSES)
    np.savez(
        folder / "images.npz",
        train_images=images[:EXAMPLES],
        train_labels=labels[:EXAMPLES],
        val_images=images[EXAMPLES:],
        val_labels=labels[EXAMPLES:],
    )
    file, whole = read_recipe("cifar10"), f"{steps} steps"
    config = file.config.replace(
        data={"path": str(folder / "images.npz")},
        model={"width": WIDTH},
        train={"batch_size": LOOP_BATCH, "duration": whole},
        eval={"batch_size": LOOP_BATCH, "every": whole},
        checkpoint={"every": whole},
        log={"every": f"{LOG_STEPS} steps"},
        parallel={"devices": 1},
    )
    return open_recipe(dataclasses.replace(file, config=config))


def make_setup() -> RunSetup:
    """Return the setup of a network on random images, the same on every process."""
    source = ArrayTable(*random_images(EXAMPLES, SIZE, CLASSES), tuple(map(str, range(CLASSES))))
    network = resnet("resnet18", CLASSES, width=WIDTH, stem="small")
    return prepare_training(network, source, None, optax.sgd(0.01, 0.9), LOCAL_BATCH)


def losses(step: TrainStep, state: TrainState, batches: list[Batch]) -> list[float]:
    figures, state = [], copy(state)
    for batch in batches:
        state, sums = step(state, batch)
        figures.append(sums.means()["loss"])
    return figures


def all_reduces(lowered: Any, compiled: Any) -> Figures:
    """Count the all-reduces as traced and as merged by XLA, their buffers (gloo sends one at a time) and dtypes."""
    figures = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(([^)]*)\)", compiled.as_text())
    return {
        "written": lowered.as_text().count("stablehlo.all_reduce"),
        "merged": len(figures),
        "buffers": sum(names.count("%") for _, names in figures),
        "dtypes": sorted({dtype for shapes, _ in figures for dtype in re.findall(r"(\w+)\[", shapes)}),
    }


if __name__ == "__main__":
    main()
