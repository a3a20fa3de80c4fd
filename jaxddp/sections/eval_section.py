"""The `eval` and `checkpoint` sections of a config: the validations of a run, and the checkpoints that it keeps."""

from dataclasses import dataclass
from typing import Literal

from jaxddp.core.duration import Duration
from jaxddp.core.ranges import Count, Decay, Period
from jaxddp.overrides import names_of
from jaxddp.sections.goal import Goal
from jaxddp.sections.train_section import BatchSize

Views = Literal["one", "mirror", "mirror_translate"]
"""The views of an image whose logits evaluation averages."""


@dataclass(frozen=True)
class EvalConfig:
    """The validations of the run."""

    every: Duration = Duration.parse("1 epoch")
    """How often to validate. The run is also validated at its end. "0 steps" disables validation."""
    batch_size: BatchSize = 256
    """Global batch size of validation. It does not affect the metrics."""
    limit: Count | None = None
    """Validate on at most this many examples, with the same proportions of classes. If None, all."""
    metrics: tuple[str, ...] = ("top1", "top5")
    """Metrics in addition to the loss, in training and validation. A top-k metric is left out if the data have no more
    than k classes."""
    views: Views = "one"
    """Test-time augmentation: average the logits of an image and its mirror image ("mirror"), or also of copies shifted
    by one pixel ("mirror_translate"). The cost is two or six times the cost of "one"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", names_of(self.metrics))


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints that a run keeps: the last `keep` and the best one. Predict, export and serve use the best one
    by default."""

    every: Duration = Duration.parse("1 epoch")
    """How often to save a checkpoint. The run also saves one at its end."""
    keep: Period = 2
    """Number of recent checkpoints to keep."""
    best: str | None = None
    """Metric that selects the best checkpoint, and that `train.stop_after` watches. Write "val" and a metric, such as
    "val loss"; or "val_ema" and a metric, for the averaged parameters (`train.ema`). If None, the top-1 accuracy of the
    parameters that predict and export use: "val_ema top1" with averaged parameters, otherwise "val top1"."""
    best_is: Literal["min", "max"] | None = None
    """Whether a lower ("min") or a higher ("max") value of that metric is better. If None, lower for the loss and the
    calibration error, higher for all other metrics."""
    best_smoothing: Decay = 0.0
    """Decay of an exponential moving average of the metric over all validations, with the bias correction of Adam. This
    average, instead of the last value, selects the best checkpoint."""

    def goal(self, *, averages: bool) -> Goal:
        """Return the parsed `best`, `best_is` and `best_smoothing`. Raises: InputError if `best` is invalid.

        Args:
            averages: whether the run averages its parameters.
        """
        return Goal.parse(self.best or Goal.default(averages=averages).name, self.best_is, self.best_smoothing)
