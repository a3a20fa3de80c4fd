"""The records that listeners of a run receive: plain numbers on the host, and a few images with predicted classes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxddp.config.goal import VAL
from jaxddp.core.errors import Preempted, counted
from jaxddp.core.user_code import describe_error

MAX_SHOWN = 1000
"""The largest number of images in a picture."""


@dataclass(frozen=True, eq=False)
class PredictedImages:
    """Images with their predicted classes.

    Attributes:
        images: uint8 or uint16 [N, H, W, C], cropped as for evaluation.
        labels: int[N]; -1 where unknown.
        predicted: int[N], the most probable class.
        probabilities: float[N], the probability of that class.
        class_names: the names of the K classes.
        heat_maps: float[N, H, W], 0 or more; the pixels that the predictions depend on. None without heat maps.
    """

    images: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray
    class_names: Sequence[str]
    heat_maps: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"PredictedImages({counted(len(self.images), 'image')}, {self.wrong.sum():,} wrong)"

    @property
    def wrong(self) -> np.ndarray:
        """bool[N], whether the prediction is wrong; False where the label is unknown."""
        return (self.labels >= 0) & (self.predicted != self.labels)

    @property
    def captions(self) -> list[str]:
        """The predicted class of each image and its probability; for a wrong prediction, also the true class."""
        names = [short_class_name(name) for name in self.class_names]
        captions = [f"{names[int(n)]} {share:.0%}" for n, share in zip(self.predicted, self.probabilities, strict=True)]
        for row in np.flatnonzero(self.wrong):
            captions[row] += f"\nis {names[int(self.labels[row])]}"
        return captions


def to_drawable(image: np.ndarray) -> np.ndarray:
    """Return an image as 8-bit gray, RGB or RGBA. Of 2 channels, the first is used; of 5 or more, the first three.

    The smallest number of a normalized image becomes black, and its largest white.
    """
    if np.issubdtype(image.dtype, np.floating):
        low, high = image.min(), image.max()
        image = ((image - low) * (255 / max(high - low, np.finfo(np.float32).tiny))).astype(np.uint8)
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    channels = image.shape[-1]
    return image[..., 0] if channels < 3 else image[..., : channels if channels == 4 else 3]


def short_class_name(name: str) -> str:
    """Return the first name of a synset: "tench" for "tench, Tinca tinca". The middle of a long name is left out."""
    first = name.split(",")[0]
    return first if len(first) <= 20 else f"{first[:9]}…{first[-10:]}"


@dataclass(frozen=True)
class Usage:
    """The operations of a step, the utilization of the devices, and their peak memory; None where unknown."""

    flops_per_step: int | None = None
    """Floating-point operations of a step over all devices."""
    flops_utilization: float | None = None
    """Model FLOP utilization: the operations per second as a share of the devices' peak."""
    peak_memory: int | None = None
    """The largest number of bytes that a device of the first process has held; see `Topology.peak_memory`."""


UNKNOWN = Usage()

Status = Literal["done", "stopped", "preempted", "interrupted", "failed"]
"""How a run ends."""


def ending_of(error: BaseException) -> tuple[Status, str]:
    """Return the status of a run that an error ends, and the reason to report; the reason is empty for Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ""
    return "preempted" if isinstance(error, Preempted) else "failed", describe_error(error)


class Description(NamedTuple):
    """What displays say about a run in words; "" where nothing is known."""

    network: str = ""
    """The network, and the dtypes in which it computes: "resnet50 in bfloat16"."""
    data: str = ""
    """How the training examples were found: "class folders in seg_train/"."""
    validation: str = ""
    """How the validation examples were found, or the path of the first one."""
    helps_decoding: str = ""
    """What helps if the steps wait for images, and the cores are busy."""
    helps_reading: str = ""
    """What helps if the steps wait for images, and the cores are not busy."""


@dataclass(frozen=True)
class RunStart:
    """A run before its first step.

    Attributes:
        start_step: 0, or the step of the checkpoint that the run resumes from.
        total_steps: the step at which the run ends.
        batch_size: the global batch size.
        num_examples: the number of training examples.
        params: the parameter pytree: arrays, or shapes and dtypes.
        traced: the steps, from 1, that are profiled; None if no profile was requested.
        config: the content of config.json.
        class_names: the class names of the data.
        num_validation: the number of validation examples; 0 if the run is not validated.
        description: what displays say about the run in words.
        logged: the `step` and `loss` of the last step logged before the checkpoint of `start_step` was saved; None if
            the checkpoint does not hold them.
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
    num_validation: int = 0
    description: Description = field(default_factory=Description, repr=False)
    logged: Mapping[str, float] | None = None


@dataclass(frozen=True)
class EpochMetrics:
    """A finished epoch: its number, from 1, the means over its examples, and its training time in seconds."""

    number: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class StepRecord:
    """A logged step.

    Attributes:
        epoch: the position in the run, in epochs.
        metrics: means over the global batch of this step: `loss`, `top1`, …
        images_per_second, data_wait_fraction: measured over the steps since the last record, without evaluation and
            saving. A step took `RunStart.batch_size / images_per_second` seconds.
        epoch_end: the epoch that ended with this step; None if no epoch ended.
        used: the utilization at the speed `images_per_second`.
        image_size: the side of the step's images in pixels; None if all images have one size.
        validations_left: the number of validations after this step and all later steps.
    """

    step: int
    epoch: float
    metrics: Mapping[str, float]
    learning_rate: float | None
    images_per_second: float
    data_wait_fraction: float
    epoch_end: EpochMetrics | None = None
    used: Usage = UNKNOWN
    image_size: int | None = None
    validations_left: int = 0


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation in progress (`seen < total`, for a progress display) or a finished one (`seen == total`).

    Attributes:
        metrics: means over the first `seen` examples.
        seen, total: examples evaluated so far, and in the set; padding is not counted.
        seconds: the time so far, without compiling.
        split: "val", or "val_ema" for averaged parameters, which are evaluated after the trained ones.
        predictions: the predictions of a few images; the images are the same at each evaluation. Only the record of the
            last split has predictions, and only if a listener requests them.
        sets: in a finished evaluation, the NumPy arrays from which each metric over the whole set was computed, by the
            metric's name.
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
    """The end of a run.

    Attributes:
        status: "stopped" if validation no longer improved, or a listener raised `StopTraining`.
        step: the last step; after a failure, the step that failed if it is known, for instance by a loss that is not
            finite.
        seconds: the time since the command or the call of `train` began.
        validation: the metrics of the last evaluation, with `count`; empty if there was none.
        reason: why the run stopped or failed.
        used: the utilization at the mean speed of this process's steps, without the first dispatch and compiling.
        averaged: like `validation`, for averaged parameters ("val_ema").
    """

    status: Status
    step: int
    seconds: float
    validation: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    used: Usage = UNKNOWN
    averaged: Mapping[str, float] = field(default_factory=dict)


METHODS = {"start": "run", "step": "record", "first_steps": "record", "evaluation": "record", "end": "run"}
"""The methods of a listener, and the name of each method's argument."""


class StopTraining(Exception):
    """Raised by a listener in `step` or `evaluation`: the run ends, saved and validated. The text is the reason."""


class Listener:
    """Receives the records of a run. Any object with some of these methods is a listener; subclassing is optional.

    Only the listeners of the first process are called, and no method may change the state. `start` is called first.
    `end` is called last and once, however the run ends, on each listener whose `start` returned.
    """

    wants_predictions = 0
    """The number of validation images to predict for `EvaluationRecord.predictions`. If listeners request
    different numbers, the largest number is used."""
    wants_metrics: tuple[str, ...] = ()
    """Names of built-in metrics over a whole set to evaluate in addition to those of the config."""

    def start(self, run: RunStart) -> None:
        """Handle the start of a new or resumed run."""

    def step(self, record: StepRecord) -> None:
        """Handle a logged step."""

    def first_steps(self, record: StepRecord) -> None:
        """Handle the speed after ten steps, in a record without metrics, if no step was logged before."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Handle an evaluation that is in progress or finished."""

    def end(self, run: RunEnd) -> None:
        """Handle the end of the run; see `RunEnd.status`."""


NOT_MEASURED = ("step", "epoch", "split", "count", "seconds")
"""Columns of a validation that are not metrics."""
Columns = dict[str, np.ndarray]


class Series(NamedTuple):
    """The rows of a run as columns, each float64[n] (`step` is int64[n]); NaN where a row has no value."""

    train: Columns
    """Logged steps: `step`, `epoch` (position in the run, in epochs), `loss`, `top1`, `learning_rate`, …"""
    epochs: Columns
    """Finished epochs: `step`, `epoch`, and the means over the epoch's examples: `loss`, `top1`, …; `seconds`."""
    val: Columns
    """Finished evaluations: `step`, `epoch`, `loss`, `top1`, …; `count` (examples), `seconds`."""
    val_ema: Columns
    """Like `val`, for averaged parameters."""


def is_wide(parts: Iterable[Columns]) -> bool:
    """Return whether all losses are positive, and span a factor of more than 100, too much for a linear axis."""
    losses = np.concatenate([np.zeros(0), *(columns["loss"] for columns in parts if "loss" in columns)])
    losses = losses[np.isfinite(losses)]
    return bool(losses.size and losses.max() > 100 * losses.min() > 0)
