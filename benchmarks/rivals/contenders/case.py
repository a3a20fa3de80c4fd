"""The input of all contenders, so that all do the same: network, images, weights, and the steps to time.

Needs only NumPy: torch's contender runs where JAX is not installed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

GATE_STEPS = 3
MOMENTUM = 0.9
STAGES = {"resnet10": (1, 1, 1, 1), "resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
BOTTLENECK = {"resnet50"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Case:
    """A network and what it is trained on: `batch` images a process, `size` pixels square."""

    network: str
    stem: str
    width: int
    size: int
    batch: int
    classes: int = 1000
    precision: str = "float32"
    learning_rate: float = 0.01

    def __str__(self) -> str:
        return (
            f"{self.network} {self.stem} stem, width {self.width}, {self.size} px, {self.batch} each, {self.precision}"
        )

    def images(self, process: int) -> tuple[np.ndarray, np.ndarray]:
        """A process's batch: uint8[batch, size, size, 3] and int64[batch], the same in every contender."""
        rng = np.random.default_rng([7, process])
        pixels = rng.integers(0, 256, (self.batch, self.size, self.size, 3), np.uint8)
        return pixels, rng.integers(0, self.classes, self.batch)


@dataclass(frozen=True)
class Task:
    """One start of a contender."""

    case: Case
    weights: Path
    """Arrays in torchvision's names, of JAX's layout (HWIO kernels, [in, out] matrices)."""
    steps: int
    """In a turn."""
    turns: int
    out: Path
    """Where process 0 writes its results."""
    devices: int | None = None
    """Of a JAX contender in one process; its batch is `batch` on each."""
    losses: int = GATE_STEPS
    """Of how many first steps the loss is told."""
    warmup: int = 0
    """Steps that follow those, and are not timed: CUDA graphs are captured in the second and third."""
    variant: str | None = None
    """What of a contender is measured, where there are several: torch's mode, or one of `jax_levers.names`."""

    @classmethod
    def parse(cls) -> "Task":
        parser = argparse.ArgumentParser()
        parser.add_argument("task", type=Path)
        return cls.read(parser.parse_args().task)

    @classmethod
    def read(cls, path: Path) -> "Task":
        values = json.loads(path.read_text())
        paths = {"weights": Path(values.pop("weights")), "out": Path(values.pop("out"))}
        return cls(case=Case(**values.pop("case")), **paths, **values)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))

    def measure(self, step: Callable[[], Any], loss: Callable[[Any], float], wait: Callable[[Any], Any]) -> dict:
        """The first losses, the seconds of the first step (which compiles), and those a step of each turn.

        Args:
            step: takes one optimizer step and returns its result, which may still be under way.
            loss: the mean loss over all processes, from a step's result.
            wait: returns when all of a result is there.
        """
        begin = time.perf_counter()
        losses = [loss(step())]
        first = time.perf_counter() - begin
        losses += [loss(step()) for _ in range(self.losses - 1)]
        if self.warmup:
            wait([step() for _ in range(self.warmup)][-1])
        turns = []
        for _ in range(self.turns):
            begin, result = time.perf_counter(), None
            for _ in range(self.steps):
                result = step()
            wait(result)
            turns.append((time.perf_counter() - begin) / self.steps)
        return {"losses": losses, "first_step": first, "step": statistics.median(turns), "turns": turns}
