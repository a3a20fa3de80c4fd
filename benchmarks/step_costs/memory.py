"""Compares the predicted memory of a step on CPUs with the peak of a new process.

    python benchmarks/step_costs/memory.py
    python benchmarks/step_costs/memory.py --only airbench "ViT-Ti/16, 224 px" --out runs/benchmarks/memory.json

For each network a process compiles the step, resets the kernel's record of its peak memory, takes steps as a run does,
and reads the peak. `predicted` is the prediction of `jaxddp.measure` before the first step, for all devices together;
`peak` is the growth of the process plus the step's arguments. `first` is the same for the first step, which also
allocates code and threads once.
"""

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import CHILD_SECONDS, Figures, machine
from jaxddp.command_line.parse import parse_recipe
from jaxddp.config import Config
from jaxddp.data.arrays import ArrayTable
from jaxddp.engine.compilation import step_options
from jaxddp.measure.memory import Needs, bytes_on_a_device
from jaxddp.mesh import Topology, simulate_cpu_devices
from jaxddp.setup.recipe import make_recipe
from jaxddp.setup.resources import Resources
from jaxddp.setup.run_setup import RunSetup, initialize
from jaxddp.setup.user_objects import objects_of_hooks

TARGET = 0.2
STEPS, CLASSES = 4, 10
REMAT = str(Path(__file__).with_name("remat_recipe.py"))


@dataclass(frozen=True)
class Case:
    """A step: a recipe, with overrides of its config."""

    batch: int
    image: int = 32
    devices: int = 1
    words: Sequence[str] = ()
    recipe: str = "cifar10"

    def command(self) -> list[str]:
        size = str(self.image)
        options = ["--train.batch-size", str(self.batch), "--data.image-size", size, "--data.resize", size]
        return [self.recipe, *options, "--parallel.cpu-devices", str(self.devices), *self.words]


def model(name: str, *more: str) -> list[str]:
    return ["--model.name", name, *more]


LARGE = ["--model.stem", "imagenet"]
SMALL = ["--model.name", "resnet10", "--model.width", "16"]
CASES = {
    "ResNet-10, 256 px": Case(2, 256, words=model("resnet10")),
    "ResNet-10, width 16": Case(512, words=SMALL),
    "ResNet-10, width 32, 64 px": Case(128, 64, words=model("resnet10", "--model.width", "32")),
    "ResNet-10, width 16, 2 devices": Case(512, devices=2, words=SMALL),
    "ResNet-10, width 16, 4 devices": Case(1024, devices=4, words=SMALL),
    "ResNet-10, width 16, 4 devices, sync": Case(1024, devices=4, words=[*SMALL, "--model.batch-norm", "sync"]),
    "ResNet-10, width 16, accumulate 4": Case(2048, words=[*SMALL, "--train.accumulate", "4"]),
    "ResNet-10, width 16, accumulate 2, 2 devices": Case(1024, devices=2, words=[*SMALL, "--train.accumulate", "2"]),
    "ResNet-10, width 16, bfloat16": Case(512, words=[*SMALL, "--train.precision", "bfloat16"]),
    "ResNet-10, width 16, in device memory": Case(512, words=[*SMALL, "--data.cache", "device"]),
    "ResNet-18, width 16": Case(512, words=["--model.width", "16"]),
    "ResNet-18, 128 px, AdamW": Case(64, 128, words=["--model.width", "32", *LARGE, "--optimizer.name", "adamw"]),
    "ResNet-50, width 16, 64 px": Case(64, 64, words=model("resnet50", "--model.width", "16")),
    "ResNet-50, 224 px": Case(8, 224, words=model("resnet50", *LARGE)),
    "ViT-Ti/16, 224 px": Case(16, 224, words=model("vit_ti16", *LARGE)),
    "ViT-Ti/16, 96 px, 2 devices": Case(128, 96, 2, words=model("vit_ti16", *LARGE)),
    "ConvNeXt-T, 64 px": Case(32, 64, words=model("convnext_tiny", *LARGE)),
    "ConvNeXt-T, 64 px, 2 devices": Case(64, 64, 2, words=model("convnext_tiny", *LARGE)),
    "airbench": Case(512, words=model("airbench")),
    "airbench, 2 devices, accumulate 2": Case(1024, devices=2, words=model("airbench", "--train.accumulate", "2")),
    "remat": Case(256, recipe=REMAT, words=["--model.width", "32"]),
    "remat, 2 devices": Case(256, devices=2, recipe=REMAT, words=["--model.width", "32"]),
}


@dataclass(frozen=True)
class Overrides:
    """Overrides after the name of the config."""

    config: Annotated[Config, tyro.conf.arg(name="")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="measure only these steps")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/memory.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_step(json.loads(options.child))))
        return
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "target": TARGET, "cases": {}}
    for name, case in CASES.items():
        if options.only and name not in options.only:
            continue
        figures = measure_in_process(case.command())
        report["cases"][name] = figures | {"words": case.command()}
        print(row_of(name, figures), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{summary(report)}\nresults: {options.out}")


def measure_in_process(words: Sequence[str]) -> Figures:
    command = [sys.executable, __file__, "--child", json.dumps(list(words))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CHILD_SECONDS, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_step(words: Sequence[str]) -> Figures:
    setup = setup_of(words)
    program, chunks = setup.program()
    if setup.config.data.cache == "device":
        setup.feed.place()
    stream, state, devices = chunks(0), setup.state, setup.topology.num_devices
    feed = next(stream).feed
    program.prepare(state, *feed)
    needs = Needs.of(program.cost, state.params, setup.topology)
    assert needs is not None
    figures: Figures = {"predicted": devices * needs.total, "temporary": devices * needs.temporary}
    argument_bytes = devices * bytes_on_a_device((state, feed))
    for key, feeds in {"first": [feed], "peak": (chunk.feed for chunk in stream)}.items():
        before = reset_peak()
        for each in feeds:
            state, _ = program(state, *each)
        jax.block_until_ready(state)
        figures[key] = read_memory("VmHWM") - before + argument_bytes
    return figures | {"held": argument_bytes}


def setup_of(words: Sequence[str]) -> RunSetup:
    """Return the setup of a recipe on random images."""
    _, file = parse_recipe(Overrides, "memory.py", list(words))
    config = file.config.replace(train={"duration": f"{STEPS} steps"}, parallel={"self_test": "never"})
    if config.train.precision is None:
        config = config.replace(train={"precision": "float32"})
    simulate_cpu_devices(config.parallel.cpu_devices or 1)
    topology, rng, count = Topology.create(), np.random.default_rng(0), STEPS * config.train.batch_size
    shape = (config.data.image_size, config.data.image_size, 3)
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    table = ArrayTable(images, rng.integers(0, CLASSES, count), tuple(map(str, range(CLASSES))))
    resources = Resources(table, compiler_options=step_options(config, topology))
    return initialize(make_recipe(config, topology, resources, objects_of_hooks(file.hooks)))


def reset_peak() -> int:
    """Reset the peak memory of this process, and return its resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Linux, proc_pid_clear_refs(5): 5 resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory("VmRSS")


def read_memory(key: str) -> int:
    """Read VmRSS, the resident bytes, or VmHWM, their peak."""
    figures = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert figures is not None
    return 1024 * int(figures[1])


def row_of(name: str, figures: Figures) -> str:
    ratio = figures["predicted"] / figures["peak"]
    return (
        f"{name:<44}{figures['predicted'] / 1e6:>9.0f} MB predicted{figures['peak'] / 1e6:>9.0f} MB peak{ratio:>8.2f}"
    )


def summary(report: Figures) -> str:
    ratios = [figures["predicted"] / figures["peak"] for figures in report["cases"].values()]
    range_of_ratios = f"predicted over peak, {len(ratios)} steps: {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{range_of_ratios}; target {1 - TARGET:.2f} to {1 + TARGET:.2f}"


if __name__ == "__main__":
    main()
