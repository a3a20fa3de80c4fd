"""The `eval` and `checkpoint` sections of a config: when a run is validated, and which checkpoints it keeps."""

from dataclasses import dataclass, field
from functools import cached_property
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
    """When and how to validate."""

    every: Duration = field(default_factory=lambda: Duration.parse("1 epoch"))
    """How often, and at the end of the run; "0 steps" never does."""
    batch_size: BatchSize = 256
    """Global, as that of training; it changes no metric."""
    limit: Count | None = None
    """Validate on this many examples only, of which each class keeps its share, as with `data.limit`; all where
    absent."""
    metrics: tuple[str, ...] = ("top1", "top5")
    """What is measured beside the loss, in training too; a top-k of no fewer than all classes is left out."""
    views: Views = "one"
    """Test-time augmentation: classify an image by the mean of its logits and those of its mirror image, or also of
    copies translated by a pixel; twice or six times the work."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", names_of(self.metrics))


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept: the last `keep` checkpoints and the best one, which predict, export and serve by default."""

    every: Duration = field(default_factory=lambda: Duration.parse("1 epoch"))
    """How often to save, and at the end of the run."""
    keep: Period = 2
    """How many of the last checkpoints stay."""
    best: str = "val top1"
    """Which one is best, also for `train.stop_after`: "val" and a metric, "val loss", or "val_ema" and a metric of the
    parameters that `train.ema` averages."""
    best_is: Literal["min", "max"] | None = None
    """Whether less of that metric is better, or more. Where absent, less of the loss and of the calibration error, and
    more of anything else."""
    best_smoothing: Decay = 0.0
    """Instead of the metric itself: its exponential mean over the validations so far, this share of which is the last
    one's, corrected for its begin."""

    @cached_property
    def goal(self) -> Goal:
        """What `best`, `best_is` and `best_smoothing` say. Raises: InputError; they say nothing."""
        return Goal.parse(self.best, self.best_is, self.best_smoothing)
