"""The common input of all contenders: network, images, weights, and the steps to time.

It needs only NumPy, because torch's contender runs where JAX is not installed.
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
    """A network and its training data: `batch` images of `size` x `size` pixels for each process.

    Only ResNets read `stem` and `width`. Networks that are not in `STAGES` are torchvision's in torch.
    """

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
        """Return a process's batch, uint8[batch, size, size, 3] and int64[batch], equal in every contender."""
        rng = np.random.default_rng([7, process])
        pixels = rng.integers(0, 256, (self.batch, self.size, self.size, 3), np.uint8)
        return pixels, rng.integers(0, self.classes, self.batch)


@dataclass(frozen=True)
class Task:
    """One start of a contender."""

    case: Case
    weights: Path
    """File of arrays with torchvision's names and JAX's layout (HWIO kernels, [in, out] matrices)."""
    steps: int
    """Steps in a turn."""
    turns: int
    out: Path
    """File to which process 0 writes its results."""
    devices: int | None = None
    """Devices of a JAX contender in one process, with `batch` images on each."""
    losses: int = GATE_STEPS
    """Number of first steps whose losses are reported."""
    warmup: int = 0
    """Untimed steps after the reported ones: CUDA graphs are captured in the second and third of them."""
    variant: str | None = None
    """The variant of the contender: torch's mode."""

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
        """Measure the first losses, the seconds of the first step (which compiles), and the seconds per step of each
        turn.

        Args:
            step: Takes one optimizer step and returns its result, which may be asynchronous.
            loss: Returns the mean loss over all processes from a step's result.
            wait: Blocks until a result is complete.
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
