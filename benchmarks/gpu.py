"""The training step on a GPU: beside torch.compile, beside the limits of the device, and lever by lever.

    python benchmarks/gpu.py --torch PYTHON --cifar DIR
    python benchmarks/gpu.py --parts batches rounds --batches 256 512
    python benchmarks/gpu.py --small --torch PYTHON

Parts, each of which starts fresh processes, one at a time on the GPU:

- gate: in float32, without TF32, both contenders must compute the same losses from equal weights and images.
- batches: ResNet-50 at 224 pixels in bfloat16, at each of `--batches`; one that runs out of memory is left out.
- rounds: both in turns, each at its own best batch.
- cifar: seconds an epoch of CIFAR-10 on the device, and the time to 94% top-1. Left out without `--cifar`.
- levers: changes that could make the step quicker, one by one, for that network and a ResNet-18 at 32 pixels; see
  `contenders/jax_levers.py`.

Each part adds its results to `--out` as it ends; a later start with other `--parts` continues from there. All
but cifar and levers need an interpreter with torch (`--torch`). `--small` runs everything on a CPU with tiny networks,
as a test; its numbers mean nothing. It has not been run on a GPU yet.
"""

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from gpu_children import CONTENDERS, Case, Children
from gpu_table import render
from harness import Figures, alternate, compare, machine

OURS, RIVAL = "jaxddp", "torch"
PARTS = ("gate", "batches", "rounds", "cifar", "levers")
LOSS_TOLERANCE = 5e-4
TOP1, TARGET = 0.94, 1.0


@dataclass(frozen=True)
class Scale:
    """The sizes of a run of this benchmark.

    Attributes:
        gate_batch: few images, as float32 without TF32 is slow.
        other: the second network of the levers.
        cifar: width, batch and duration.
    """

    case: Case
    gate_batch: int
    batches: tuple[int, ...]
    other: Case
    cifar: tuple[int, int, str]
    steps: int
    turns: int
    rounds: int


# At a higher rate, differences of rounding grow from step to step.
GPU = Scale(
    case=Case("resnet50", "imagenet", 64, 224, 256, precision="bfloat16", learning_rate=1e-4),
    gate_batch=16,
    batches=(64, 128, 256, 512),
    other=Case("resnet18", "small", 64, 32, 256, classes=10, precision="bfloat16"),
    cifar=(64, 256, "30 epochs"),
    steps=50,
    turns=3,
    rounds=5,
)
SMALL = Scale(
    case=Case("resnet50", "small", 8, 32, 4, classes=10, precision="bfloat16", learning_rate=1e-4),
    gate_batch=4,
    batches=(2, 4),
    other=Case("resnet18", "small", 8, 16, 4, classes=10, precision="bfloat16"),
    cifar=(8, 16, "2 epochs"),
    steps=3,
    turns=2,
    rounds=2,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--torch", default=sys.executable, help="the Python interpreter that has torch")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10's binary version or an .npz file")
    parser.add_argument("--batches", nargs="+", type=int, help="to try")
    parser.add_argument("--rounds", type=int, help="starts of each contender, and turns of each lever")
    parser.add_argument("--steps", type=int, help="in a turn")
    parser.add_argument("--small", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--out", type=Path, help="runs/benchmarks/gpu.json, or gpu-small.json")
    options = parser.parse_args()
    scale = SMALL if options.small else GPU
    given = {"batches": options.batches, "rounds": options.rounds, "steps": options.steps}
    scale = replace(scale, **{name: value for name, value in given.items() if value})
    out = options.out or Path(f"runs/benchmarks/gpu{'-small' if options.small else ''}.json")
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), options.torch, {"JAX_PLATFORMS": "cpu"} if options.small else {})
        if not options.small and children.platform() != "gpu":
            refuse("JAX finds no GPU here; start this where there is one, or see that it works with --small")
        report = earlier(out, scale.case)
        report |= {"command": " ".join(["python", *sys.argv]), "machine": machine()}
        bench = Bench(scale, children, options.small, options.cifar, report)
        for part in ("facts", *(part for part in PARTS if part in options.parts)):
            print(f"{part} ...", flush=True)
            report[part] = getattr(bench, part)()
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {out}\n\n{render(report)}")


def refuse(line: str) -> NoReturn:
    print(f"gpu.py: {line}", file=sys.stderr)
    sys.exit(2)


def earlier(path: Path, case: Case) -> Figures:
    """The results of an earlier start with the same network."""
    if path.is_file():
        found = json.loads(path.read_text())
        if found["case"] != asdict(case):
            refuse(f"{path} holds results of another network; give another --out")
        return found
    return {"case": asdict(case)}


@dataclass
class Bench:
    """The parts, each of which returns its results; `report` holds those of the parts before."""

    scale: Scale
    children: Children
    small: bool
    cifar_path: Path | None
    report: Figures

    def facts(self) -> Figures:
        """The limits of the device in JAX and torch, the FLOPs of the step; also writes the weights of all parts."""
        self.certain("jax_facts", self.scale.other)
        case = replace(self.scale.case, batch=self.scale.gate_batch)
        found = {OURS: self.certain("jax_facts", case)}
        here, before = found[OURS]["device"], self.report.get("facts", found)[OURS]["device"]
        if here != before:
            refuse(f"its results are of one {before}, and this is one {here}; give another --out")
        return found | ({RIVAL: self.certain("torch_facts", case)} if self.children.has_torch() else {})

    def gate(self) -> Figures:
        case = replace(self.scale.case, precision="float32", batch=self.scale.gate_batch)
        found = {name: self.certain(f"{name}_step", case)["losses"] for name in (OURS, RIVAL)}
        np.testing.assert_allclose(found[OURS], found[RIVAL], rtol=LOSS_TOLERANCE, err_msg=str(found))
        return found

    def batches(self) -> Figures:
        """Images per second of each contender at each batch; None: out of memory. Batches of earlier starts stay."""
        found: Figures = self.report.get("batches", {OURS: {}, RIVAL: {}})
        for batch in self.scale.batches:
            for name, speeds in found.items():
                # Keys in JSON are strings.
                speeds[str(batch)] = self.speed(name, batch)
                print(f"  {name} {batch}: {speeds[str(batch)]}", flush=True)
        return found

    def rounds(self) -> Figures:
        best = {name: self.best_batch(name) for name in (OURS, RIVAL)}

        def turn(name: str) -> float:
            """Seconds an image."""
            case = replace(self.scale.case, batch=best[name])
            return self.certain(f"{name}_step", case, self.scale.steps, self.scale.turns)["step"] / case.batch

        turns = {name: functools.partial(turn, name) for name in best}
        return compare(alternate(turns, self.scale.rounds), 1, TARGET) | {"batch": best}

    def cifar(self) -> Figures | None:
        width, batch, duration = self.scale.cifar
        path = self.cifar_path or (self.made_cifar() if self.small else None)
        if path is None:
            return self.report.get("cifar")
        out = self.children.folder / "out.json"
        options = {"duration": duration, "width": width, "batch": batch, "top1": TOP1, "out": out}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        figures = self.children.run([sys.executable, str(CONTENDERS / "jax_cifar.py"), str(path), *words], out)
        return figures or sys.exit("jax_cifar ran out of memory")

    def levers(self) -> Figures:
        cases = (replace(self.scale.case, batch=self.best_batch(OURS)), self.scale.other)
        steps, rounds = self.scale.steps, self.scale.rounds
        return {str(case): self.certain("jax_levers", case, steps, rounds) for case in cases}

    # --- Shared by the parts ---

    def best_batch(self, name: str) -> int:
        """The batch with the most images per second."""
        speeds: Mapping[str, float | None] = self.report.get("batches", {}).get(name, {})
        measured = {int(batch): speed for batch, speed in speeds.items() if speed is not None}
        if not measured:
            refuse(f"no batch of {name} was measured; give --parts batches first")
        return max(measured, key=lambda batch: measured[batch])

    def speed(self, name: str, batch: int) -> float | None:
        """Images per second of a fresh process; None where it ran out of memory."""
        case = replace(self.scale.case, batch=batch)
        figures = self.children.start(f"{name}_step", case, self.scale.steps, self.scale.turns)
        return batch / figures["step"] if figures else None

    def certain(self, script: str, case: Case, steps: int = 1, turns: int = 1) -> Figures:
        """The results of a case that must fit into memory."""
        figures = self.children.start(script, case, steps, turns)
        if figures is None:
            sys.exit(f"{script} ran out of memory: {case}")
        return figures

    def made_cifar(self) -> Path:
        """A few images of CIFAR's size whose color is their class."""
        rng, arrays = np.random.default_rng(0), {}
        colours = rng.integers(0, 256, (10, 1, 1, 3))
        for split, count in (("train", 64), ("val", 32)):
            labels = np.arange(count) % 10
            noise = rng.integers(-20, 21, (count, 32, 32, 3))
            arrays |= {f"{split}_images": np.clip(colours[labels] + noise, 0, 255).astype(np.uint8)}
            arrays |= {f"{split}_labels": labels}
        path = self.children.folder / "cifar.npz"
        np.savez(path, **arrays)
        return path


if __name__ == "__main__":
    main()
