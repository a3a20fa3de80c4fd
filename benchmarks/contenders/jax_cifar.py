"""CIFAR-10 on the device, by the recipe of configs/cifar10.py in bfloat16. Started by `benchmarks/gpu.py`.

The run is that of `jaxddp train`, but it is logged to metrics.jsonl alone, which needs no TensorFlow.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxddp.experiment.experiment import Experiment, open_experiment, train
from jaxddp.recipe_file import read_recipe
from jaxddp.training.events import EvaluationRecord, Listener, RunStart
from jaxddp.training.listeners.history import History


class Clock(Listener):
    """When each evaluation ended, in seconds since the loop began, which compiles the step first."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.evaluations: list[tuple[float, float]] = []
        """(seconds, top-1)."""

    def start(self, run: RunStart) -> None:
        self.begin = time.perf_counter()

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self.evaluations.append((time.perf_counter() - self.begin, record.metrics["top1"]))

    def reached(self, top1: float) -> float | None:
        return next((seconds for seconds, found in self.evaluations if found >= top1), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="CIFAR-10's binary version, or an .npz file")
    parser.add_argument("--top1", type=float, required=True)
    parser.add_argument("--duration", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    file = read_recipe("cifar10")
    config = file.config.replace(
        data={"path": options.data, "cache": "device"},
        model={"width": options.width},
        train={"precision": "bfloat16", "duration": options.duration, "batch_size": options.batch},
        eval={"batch_size": options.batch},
        log={"to": ("jsonl",)},
        parallel={"devices": 1},
    )
    options.out.write_text(json.dumps(run(open_experiment(dataclasses.replace(file, config=config)), options.top1)))


def run(experiment: Experiment, top1: float) -> dict[str, Any]:
    clock, history = Clock(), History()
    with tempfile.TemporaryDirectory() as workdir:
        train(experiment, Path(workdir), listeners=[clock, history])
    seconds = [float(each) for each in history.epochs["seconds"]]
    return {
        "config": experiment.config.to_dict(),
        "examples": len(experiment.resources.train),
        "epoch_seconds": seconds,
        # The first epoch compiles.
        "epoch": statistics.median(seconds[1:] or seconds),
        "evaluations": clock.evaluations,
        "top1": clock.evaluations[-1][1],
        "wanted_top1": top1,
        "seconds_to_top1": clock.reached(top1),
    }


if __name__ == "__main__":
    main()
