"""Measures the cost of a run's checks: the comparison of replicas, and the self-test before the first step.

    python benchmarks/step_costs/checks.py
    python benchmarks/step_costs/checks.py --rounds 9 --networks mlp resnet18

The comparison alternates with a step of a ResNet-18 of width 16 on 32x32 images, on two simulated devices of one
process. Its program is compiled before, and the compile time is reported separately. The self-test is timed including
compilation, in a separate process for each network, as the setting "always" runs it, with the estimate that "auto"
uses. The cache of compiled programs is off.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import CHILD_SECONDS, Figures, alternate, copy, machine, random_images
from jaxddp.api import prepare_training, resnet
from jaxddp.data.arrays import ArrayTable
from jaxddp.engine.replicas import Replicas
from jaxddp.engine.state import TrainState
from jaxddp.mesh import simulate_cpu_devices
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.run_training import make_run

DEVICES, CLASSES, LOCAL_BATCH = 2, 10, 64


class MLP(nn.Module):
    """An MLP with two hidden layers of 64."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(CLASSES)(x)


NETWORKS: dict[str, tuple[Any, int]] = {
    "linear": (nn.Sequential([lambda images: images.reshape(len(images), -1), nn.Dense(CLASSES)]), 8),
    "mlp": (MLP(), 8),
    "resnet10": (resnet("resnet10", CLASSES, width=16, stem="small"), 32),
    "digits": (resnet("resnet18", CLASSES, width=8, stem="small"), 8),
    "resnet18": (resnet("resnet18", CLASSES, width=16, stem="small"), 32),
    "resnet50": (resnet("resnet50", 1000), 64),
}
"""Networks by name, with the side of their images."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of the comparison and of the step")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=[*NETWORKS], help="for the self-test")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/checks.json"))
    parser.add_argument("--child", choices=NETWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    simulate_cpu_devices(DEVICES)
    if options.child:
        print(json.dumps(self_test(*NETWORKS[options.child])))
        return
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    report["replicas"] = results = compare_replicas(setup_of(*NETWORKS["resnet18"]), options.rounds)
    print(
        f"replicas: {results['megabytes']:.1f} MB compared in {1000 * results['seconds']:.1f} ms (step "
        f"{1000 * results['step_seconds']:.0f} ms, {results['share_of_a_step']:.1%}); compiled in "
        f"{results['compile_seconds']:.2f} s"
    )
    report["self_test"] = {}
    for name in options.networks:
        command = [sys.executable, __file__, "--child", name]
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=CHILD_SECONDS)
        report["self_test"][name] = figures = json.loads(child.stdout.splitlines()[-1])
        print(f"self-test of {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {options.out}")


def setup_of(network: Any, size: int) -> RunSetup:
    """Return the setup of a network on random images, with momentum in its state."""
    classes = 1000 if size == 64 else CLASSES
    table = ArrayTable(*random_images(4 * DEVICES * LOCAL_BATCH, size, classes), tuple(map(str, range(classes))))
    return prepare_training(network, table, DEVICES, optax.sgd(0.1, momentum=0.9), LOCAL_BATCH)


def compare_replicas(setup: RunSetup, rounds: int) -> Figures:
    """Return the median times of a comparison of replicas and of a step, and their ratio."""
    replicas, step, (batch, *_) = Replicas(setup.layout.way), setup.step(), setup.batches(0, 1)
    begin = time.perf_counter()
    replicas.check(0, setup.state)
    compiling = time.perf_counter() - begin

    def take_step() -> float:
        state: TrainState = copy(setup.state)
        begin = time.perf_counter()
        jax.block_until_ready(step(state, batch))
        return time.perf_counter() - begin

    def check() -> float:
        begin = time.perf_counter()
        replicas.check(0, setup.state)
        return time.perf_counter() - begin

    take_step()
    seconds = alternate({"check": check, "step": take_step}, rounds)
    check_seconds, step_seconds = (statistics.median(turns) for turns in seconds.values())
    return {
        "megabytes": sum(leaf.nbytes for leaf in jax.tree.leaves(setup.state)) / 1e6,
        "seconds": check_seconds,
        "step_seconds": step_seconds,
        "share_of_a_step": check_seconds / step_seconds,
        "compile_seconds": compiling,
        "turns": seconds,
    }


def self_test(network: Any, size: int) -> Figures:
    """Return the time of the self-test before a run's first step, and the estimate that "auto" uses."""
    setup = setup_of(network, size)
    config = setup.config.replace(parallel={"self_test": "always"})
    run = make_run(setup.changed(config=config))
    feed, test = next(run.chunks(0)).feed, run.self_test
    assert test is not None
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        test(run.state, *feed)
        seconds.append(time.perf_counter() - begin)
    first, again = seconds
    leaves = len(jax.tree.leaves(run.state.params))
    return {"parameters": leaves, "operations": test.operations, "seconds": first, "seconds_again": again}


if __name__ == "__main__":
    main()
