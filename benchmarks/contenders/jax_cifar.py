"""CIFAR-10 on the device, by the recipe of configs/cifar10.py in bfloat16, without TensorFlow. Started by
`benchmarks/gpu.py`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from jaxddp.config import Config, load
from jaxddp.data.opening import open_tables
from jaxddp.data.order import SampleOrder
from jaxddp.engine.objective import cross_entropy
from jaxddp.engine.optimizer import make_optimizer, make_schedule
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.experiment.setup import prepare, train
from jaxddp.mesh import Topology
from jaxddp.models.resnet import resnet
from jaxddp.training.events import EvaluationRecord, RunEnd, RunStart, StepRecord
from jaxddp.training.listeners.history import History
from jaxddp.training.plan import Plan


class Clock:
    """When each evaluation ended, in seconds since the loop began, which compiles the step first."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.evaluations: list[tuple[float, float]] = []
        """(seconds, top-1)."""

    def start(self, run: RunStart) -> None:
        self.begin = time.perf_counter()

    def step(self, record: StepRecord) -> None:
        pass

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self.evaluations.append((time.perf_counter() - self.begin, record.metrics["top1"]))

    def end(self, run: RunEnd) -> None:
        pass

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
    config = load("cifar10").replace(
        data={"path": options.data, "cache": "device"},
        model={"width": options.width},
        train={"precision": "bfloat16", "duration": options.duration, "batch_size": options.batch},
        eval={"batch_size": options.batch},
    )
    options.out.write_text(json.dumps(run(config, options.top1)))


def run(config: Config, top1: float) -> dict[str, Any]:
    keep_compiled_programs()
    train_table, val_table = open_tables(config.data)
    plan, topology = Plan.of(config, len(train_table)), Topology.create(1)
    sizes = {"num_examples": plan.num_examples, "batch_size": plan.batch_size}
    warmup = config.optimizer.warmup.steps(**sizes, total_steps=plan.total_steps)
    schedule = make_schedule(config.optimizer, total_steps=plan.total_steps, warmup_steps=warmup)
    model, dtype = config.model, str(config.train.precision)
    network = resnet(model.name, train_table.num_classes, width=model.width, stem=model.stem, dtype=dtype)
    order = SampleOrder(len(train_table), config.train.batch_size, config.seed)
    optimizer = make_optimizer(config.optimizer, schedule)
    setup = prepare(network, train_table, optimizer, topology, order, data=config.data, dtype=dtype)
    objective, clock, history = setup.objective(cross_entropy()), Clock(), History()
    evaluator = setup.evaluator(objective, val_table, config.eval.batch_size)
    train(setup, objective, plan, evaluator=evaluator, listeners=[clock, history])
    seconds = [float(each) for each in history.epochs["seconds"]]
    return {
        "config": config.to_dict(),
        "examples": len(train_table),
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
