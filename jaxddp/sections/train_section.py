"""The `train` section of a config: the length of the run, its batches, and options of the training step."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.ranges import Decay, Factor, Period, Range, Share
from jaxddp.registry import Requires

BatchSize = Annotated[int, Range(1, 2**24)]
"""The number of images in a batch."""
Precision = Literal["float32", "bfloat16", "float16"]
"""The dtype of a computation."""


@dataclass(frozen=True)
class TrainConfig:
    """The length of the run, its batches, and options of the training step."""

    batch_size: BatchSize = 256
    """Global batch size, divided among all devices of all processes."""
    duration: Duration = Duration.parse("90 epochs")
    """Length of the run: "90 epochs", "5000 steps" or "1_000_000 examples"."""
    label_smoothing: Decay = 0.0
    """Fraction of each label that is spread evenly over all classes, in training only."""
    accumulate: Annotated[int, Range(1, 65_536)] = 1
    """Gradient accumulation: each device computes its part of a batch in this many microbatches, to save memory. With
    local batch norm, each microbatch is normalized separately."""
    precision: Precision | None = None
    """Precision of the computation. Parameters, batch statistics and the loss stay float32. If None, float32 on a CPU,
    bfloat16 on a GPU or TPU. float16 uses dynamic loss scaling."""
    gradient_precision: Literal["bfloat16"] | None = None
    """Precision in which devices exchange gradients: bfloat16 halves the traffic and rounds each gradient. If None, no
    rounding."""
    max_bad_steps: Annotated[int, Range(0, 1_000_000)] = 10
    """A step with a non-finite gradient is skipped, and after this many skipped steps in a row the run ends. With 0, no
    step is skipped: the run ends after the first such step. With float16, steps are always skipped, and the run
    ends at the first step whose gradient is not finite at any loss scale."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the parameters, such as 0.999. The average is validated as "val_ema",
    and predict, export and serve use it instead of the parameters. If None, no average."""
    ema_warmup: Annotated[bool, Requires("train.ema")] = True
    """Limit the decay at step t to (1 + t)/(10 + t), so that the average soon forgets the initial parameters."""
    ema_every: Annotated[Period, Requires("train.ema")] = 1
    """Update the average once per this many steps, with the decay raised to the power of this number."""
    sync_every: Duration | None = None
    """How often groups of devices (`parallel.groups`) average their parameters, such as "50 steps". In the steps
    between, each group trains its own parameters (local SGD). If None, all devices average the gradients of each
    step."""
    outer_optimizer: Annotated[Literal["mean", "nesterov"], Requires("train.sync_every")] = "mean"
    """What follows the average of the groups' parameters: "mean" continues from the average, "nesterov" moves to it
    with Nesterov momentum (DiLoCo)."""
    outer_rate: Annotated[Factor, Requires("train.outer_optimizer", ("nesterov",))] = 0.7
    """Learning rate of the outer optimizer "nesterov"."""
    outer_momentum: Annotated[Decay, Requires("train.outer_optimizer", ("nesterov",))] = 0.9
    """Momentum of the outer optimizer "nesterov"."""
    lookahead: Period | None = None
    """Lookahead: the number of steps (5 is usual) after which slow weights move toward the parameters, and the
    parameters are reset to the slow weights. If None, no Lookahead."""
    lookahead_decay: Annotated[Share, Requires("train.lookahead")] = 0.5
    """Fraction of the slow weights that each Lookahead update keeps."""
    stop_after: Period | None = None
    """Early stopping: end the run after this many validations in a row without an improvement of `checkpoint.best`. If
    None, never."""
    stop_min_gain: Annotated[Factor, Requires("train.stop_after")] = 0.0
    """Smallest change of the metric that `stop_after` treats as an improvement."""
