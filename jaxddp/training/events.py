"""What the loop tells its listeners: plain numbers, already fetched from the devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxddp.core.errors import Preempted
from jaxddp.core.user_code import is_ctrl_c, told
from jaxddp.sections.goal import VAL
from jaxddp.training.validation.predicted_images import PredictedImages


@dataclass(frozen=True)
class Used:
    """What the steps ask of the devices, and how much of them they use; None where that is unknown."""

    flops_per_step: int | None = None
    """Floating-point operations over all devices."""
    flops_utilization: float | None = None
    """Model FLOP utilization: their share of what the devices could do at their peak."""
    peak_memory: int | None = None
    """The most bytes that a device of the first process has held so far; see `Topology.peak_memory`."""


UNKNOWN = Used()

Status = Literal["done", "stopped", "preempted", "interrupted", "failed"]
"""How a run ends."""


def status_of(error: BaseException) -> Status:
    """Of a run that an error ends."""
    if isinstance(error, Preempted):
        return "preempted"
    return "interrupted" if is_ctrl_c(error) else "failed"


def reason_of(error: BaseException) -> str:
    """What is said of it; nothing of Ctrl-C."""
    return "" if is_ctrl_c(error) else told(error)


@dataclass(frozen=True)
class RunStart:
    """What is known before the first step.

    `start_step` is 0, or the step of the checkpoint that the run resumes; `total_steps` is the step at which it ends.
    `params` is the parameter pytree (arrays, or shapes and dtypes), for an overview. `traced` are the steps, from 1,
    that a profile traces; None where none was asked for. `config` is what config.json says of the run; `class_names`
    are those of its data. `logged` is the `step` and the `loss` of the last step that was logged before the checkpoint
    of `start_step` was saved; None where that does not say.
    """

    start_step: int
    total_steps: int
    batch_size: int
    num_examples: int
    devices: int
    processes: int
    device_kind: str = "cpu"
    workdir: Path | None = None
    params: Any = field(default=None, repr=False)
    traced: range | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    class_names: tuple[str, ...] = field(default=(), repr=False)
    logged: Mapping[str, float] | None = None


@dataclass(frozen=True)
class EpochMetrics:
    """An epoch that ended, counted from 1: means over all of its examples, and its wall-clock seconds."""

    number: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one logged step. `metrics` are that step's own over the global batch: `loss`, `top1`, …

    `images_per_second` and `data_wait_fraction` are of the steps since the last record, evaluation and saving excluded;
    a step took `RunStart.batch_size` over the former, in seconds.
    `epoch` is the position in the run in epochs. `epoch_end` is set where an epoch ended with this step. `used` is at
    the speed of `images_per_second`. `image_size` is the side of the step's images, where it grows.
    """

    step: int
    epoch: float
    metrics: Mapping[str, float]
    learning_rate: float | None
    images_per_second: float
    data_wait_fraction: float
    epoch_end: EpochMetrics | None = None
    used: Used = UNKNOWN
    image_size: int | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation in progress (`seen < total`, for a progress display) or finished (`seen == total`).

    The `split` is "val", or "val_ema" for averaged parameters, which are measured after the trained ones. `metrics` are
    means over the `seen` examples so far. Padding is not seen: when finished, `seen` is the set's size, and
    the last split's `predictions` are those of a few images, the same ones each time, if a listener wants them. `sets`
    then has, by the names of metrics over the whole set, the NumPy arrays that they were made of.
    """

    step: int
    epoch: float
    metrics: Mapping[str, float]
    seen: int
    total: int
    seconds: float
    split: str = VAL
    predictions: PredictedImages | None = None
    sets: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def final(self) -> bool:
        return self.seen >= self.total


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. `validation` holds the last evaluation's metrics, with `count`; empty where there was none.

    `averaged` holds those of parameters that are measured beside the trained ones ("val_ema"). A run is "stopped" where
    its validations brought no gain, which `reason` tells. `used` is at the speed of all the steps that this process
    trained, its first dispatch and compiling excluded.
    """

    status: Status
    step: int
    seconds: float
    validation: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    used: Used = UNKNOWN
    averaged: Mapping[str, float] = field(default_factory=dict)


MOMENTS = {"start": "run", "step": "record", "evaluation": "record", "end": "run"}
"""A listener's methods, in their order, and what each is called with."""


class Listener:
    """Anything that watches a run: an object with any of these methods, a subclass of this one or not.

    Only the first process has listeners; none of the moments may change the state. `start` comes first, `end` last,
    and once, however the run ended, to each listener whose `start` returned.
    """

    wants_predictions = 0
    """Of how many validation images the finished evaluations are to have `predictions`; most wanted by any listener."""
    wants_metrics: tuple[str, ...] = ()
    """Built-in metrics over a whole set that evaluations are to measure beside those of the config, by their names."""

    def start(self, run: RunStart) -> None:
        """The run begins, or resumes."""

    def step(self, record: StepRecord) -> None:
        """A step was logged."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation is in progress, or finished."""

    def end(self, run: RunEnd) -> None:
        """The run is done, was stopped or preempted, or failed."""
