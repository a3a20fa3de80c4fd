"""The lines of text about a run's progress. All displays share them; they contain no control characters."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxddp.core.duration import Duration
from jaxddp.core.phases import spent
from jaxddp.core.wording import counted, duration, figure, plural, size, speed
from jaxddp.sections.goal import VAL, VAL_EMA
from jaxddp.training.events import EpochMetrics, EvaluationRecord, Listener, RunEnd, RunStart, StepRecord, Usage


def opening(run: RunStart) -> list[str]:
    """Return the first lines: the sizes of network and batch, the length, the work directory, the validation data."""
    scale = [counted(count_parameters(run.params), "parameter")] if run.params is not None else []
    devices = f"{run.devices} x {run.device_kind}" + (f" in {run.processes} processes" if run.processes > 1 else "")
    scale += [counted(run.num_examples, "example"), f"global batch {run.batch_size:,} on {devices}"]
    epochs = total_epochs(run)
    length = [f"{counted(run.total_steps, 'step')} ({_epochs(epochs)} {plural(epochs, 'epoch')})"]
    length += [f"resuming at step {run.start_step:,}"] if run.start_step else []
    length += [f"writing to {run.workdir}"] if run.workdir else []
    if run.traced is not None:
        nothing = "no step left to trace (the first step compiles and is not traced)"
        length += [f"tracing steps {run.traced[0]:,} to {run.traced[-1]:,}" if run.traced else nothing]
    lines = [" | ".join(scale), " | ".join(length)]
    if run.num_validation:
        first = f"; the first is {run.first_validated}" if run.first_validated else ""
        lines.append(f"validating on {counted(run.num_validation, 'example')}{first}")
    return lines


def step(run: RunStart, record: StepRecord, remaining: float | None) -> str:
    """Return the line of a logged step; `remaining` is in seconds, None if unknown."""
    line = f"step {record.step}/{run.total_steps}  {position(run, record.epoch)}"
    return f"{line}  {format_metrics(record.metrics)}  {pace(record)}  ETA {duration(remaining)}"


def position(run: RunStart, epoch: float) -> str:
    """Return the position of the run in epochs: `epoch 1.28/3.2`."""
    total = total_epochs(run)
    return f"epoch {min(epoch, total):.2f}/{_epochs(total)}"


def _epochs(total: float) -> str:
    return f"{total:.3g}" if total < 1000 else f"{total:,.0f}"


def pace(record: StepRecord) -> str:
    """Return the learning rate, the speed, the utilization if known, and the share of time spent waiting for data."""
    rate = "" if record.learning_rate is None else f"lr {record.learning_rate:.4g}  "
    used = "  ".join([f"{speed(record.images_per_second)} images/s", *_utilization(record.used)])
    return f"{rate}{used}  data wait {record.data_wait_fraction:.0%}"


def epoch(end: EpochMetrics, evaluation: EvaluationRecord | None) -> str:
    """Return the line of an epoch: its training metrics, those of an evaluation at its last step, and its seconds."""
    line = f"epoch {end.number:3d}  train {format_metrics(end.metrics)}"
    line += "" if evaluation is None else f"  {evaluation.split} {format_metrics(evaluation.metrics)}"
    return f"{line}  {duration(end.seconds)}"


def evaluation(record: EvaluationRecord) -> str:
    """Return the line of an evaluation that is not shown in the line of an epoch."""
    metrics = f"{record.split} {format_metrics(record.metrics)}"
    return f"step {record.step}  epoch {record.epoch:.2f}  {metrics}  {record.seen:,} in {duration(record.seconds)}"


def closing(run: RunEnd, work_seconds: float) -> str:
    """Return the last line: the status, the time of training and validation, the last metrics, and the utilization."""
    line = f"{run.status} at step {run.step:,} after {duration(work_seconds)} of training and validation"
    line += f" ({duration(run.seconds)} in all)"
    line += "; the same command resumes it" if run.status == "preempted" else ""
    line += f": {run.reason}" if run.status == "stopped" else ""
    splits = {VAL: run.validation, VAL_EMA: run.averaged}
    results = [f"{split} {format_metrics(metrics)}" for split, metrics in splits.items() if metrics]
    results += _utilization(run.used)
    results += [f"peak memory {size(run.used.peak_memory)}"] if run.used.peak_memory is not None else []
    return "  ".join([line, *results])


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as text: `loss 0.4312 top-1 85.21%`."""
    return " ".join(_format_metric(name, value) for name, value in metrics.items() if name != "count")


def total_epochs(run: RunStart) -> float:
    """Return the length of the run in epochs. If the config gives the duration in epochs, this number is returned.

    A number computed from the steps may be larger, because the last step is a whole batch: six epochs of 1,497 examples
    are 281 steps of 32 examples, which are 6.01 epochs.
    """
    duration_of_config = run.config.get("train", {}).get("duration")
    if duration_of_config is not None and (length := Duration.parse(duration_of_config)).unit == "epochs":
        return float(length.amount)
    return run.total_steps * run.batch_size / run.num_examples


def count_parameters(params: Any) -> int:
    """Return the number of elements in a pytree of arrays or shapes."""
    import jax  # The line about a run that has ended needs no JAX.

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class RunLines(Listener):
    """The lines that every display keeps on the screen: the start and the end of a run, its epochs and its evaluations.

    The line of an epoch also shows the evaluation at the epoch's last step, so it is shown after that evaluation.

    Args:
        keep: shows a line that stays on the screen.
    """

    def __init__(self, keep: Callable[[str], None]):
        self._keep = keep
        self._pending_epoch: StepRecord | None = None

    def start(self, run: RunStart) -> None:
        self._run, self._last = run, run.start_step
        self._step_seconds = self._validation_seconds = 0.0
        self._last_validation: float | None = None
        self._saved_before = spent().get("save", 0.0)
        for line in opening(run):
            self._keep(line)

    def step(self, record: StepRecord) -> None:
        self.flush()
        # `jaxddp runs` adds up the same seconds from the log.
        if record.images_per_second > 0:
            self._step_seconds += (record.step - self._last) * self._run.batch_size / record.images_per_second
        self._last = record.step
        if record.epoch_end is not None:
            self._pending_epoch = record

    def evaluation(self, record: EvaluationRecord) -> None:
        if not record.final:
            return
        self._validation_seconds += record.seconds
        # The averaged parameters are evaluated in the same validation, after the trained ones.
        earlier = 0.0 if record.split == VAL else self._last_validation or 0.0
        self._last_validation = earlier + record.seconds
        if self._pending_epoch is not None and self._pending_epoch.step == record.step:
            self.flush(record)
        else:
            self.flush()
            self._keep(evaluation(record))

    def end(self, run: RunEnd) -> None:
        self.flush()
        self._keep(closing(run, self._step_seconds + self._validation_seconds))

    def flush(self, record: EvaluationRecord | None = None) -> None:
        """Show the line of the last finished epoch, if it is not shown yet."""
        if self._pending_epoch is not None and self._pending_epoch.epoch_end is not None:
            self._keep(epoch(self._pending_epoch.epoch_end, record))
        self._pending_epoch = None

    def remaining(self, record: StepRecord) -> float | None:
        """Estimate the seconds left after a logged step that `step` has received; None if they are unknown.

        They are the mean time of a step so far, with saving, for each step that is left, and the time of the last
        validation for each validation. Compiling is left out. Before the first validation, an image is assumed to take
        a third of its time in training, because there is no backward pass.
        """
        run, done = self._run, record.step - self._run.start_step
        if not self._step_seconds:
            return None
        saving = spent().get("save", 0.0) - self._saved_before
        step_seconds, validation = (self._step_seconds + saving) / done, self._last_validation
        if validation is None:
            validation = run.num_validation / run.batch_size * step_seconds / 3
        return (run.total_steps - record.step) * step_seconds + record.validations_left * validation


def _utilization(used: Usage) -> list[str]:
    return [f"MFU {used.flops_utilization:.1%}"] if used.flops_utilization is not None else []


def _format_metric(name: str, value: float) -> str:
    return f"{re.sub(r'^top(?=[0-9]+$)', 'top-', name)} {figure(name, value)}"
