"""Sends the events of a made-up run to listeners."""

import math

from jaxddp.training.events import EpochMetrics, EvaluationRecord, Listener, RunEnd, RunStart, StepRecord


def run_start(start_step: int = 0, **changes: object) -> RunStart:
    defaults = {"total_steps": TOTAL, "batch_size": BATCH, "num_examples": EXAMPLES, "devices": 4, "processes": 2}
    return RunStart(**{"start_step": start_step, **defaults, **changes})


def step_record(step: int, **changes: object) -> StepRecord:
    epoch = step * BATCH / EXAMPLES
    ends = {4: 1, 7: 2, 10: 3}
    end = EpochMetrics(ends[step], {"loss": 4 / step, "top1": step / 11}, 7.25) if step in ends else None
    metrics = {"loss": math.pi / step, "top1": step / 13, "top5": step / 12}
    defaults = {"metrics": metrics, "learning_rate": 0.1 / 3, "images_per_second": 1234.5, "data_wait_fraction": 1 / 7}
    return StepRecord(**{"step": step, "epoch": epoch, **defaults, "epoch_end": end, **changes})


def evaluation_record(step: int, seen: int = 77, **changes: object) -> EvaluationRecord:
    metrics = {"loss": math.e / step, "top1": step / 17}
    defaults = {"metrics": metrics, "seen": seen, "total": 77, "seconds": 2.5}
    return EvaluationRecord(**{"step": step, "epoch": step * BATCH / EXAMPLES, **defaults, **changes})


BATCH, EXAMPLES, TOTAL = 32, 100, 10  # Epochs end at steps 4, 7 and 10.


def drive(*listeners: Listener, start: int = 0, stop: int = TOTAL, evaluate: tuple[int, ...] = (4, 10)) -> None:
    """Send the steps after `start`, up to `stop`. A run that stops before `TOTAL` has no end, as if it was killed."""
    for listener in listeners:
        listener.start(run_start(start))
    for step in range(start + 1, stop + 1):
        for listener in listeners:
            listener.step(step_record(step))
        for seen in (32, 64, 77) if step in evaluate else ():
            for listener in listeners:
                listener.evaluation(evaluation_record(step, seen))
    if stop == TOTAL:
        validation = {"loss": math.e / TOTAL, "top1": TOTAL / 17, "count": 77} if TOTAL in evaluate else {}
        for listener in listeners:
            listener.end(RunEnd("done", TOTAL, 90.0, validation))
