"""The part of a config that says how much is trained, and over what batches."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.ranges import Decay, Factor, Period, Range, Share

BatchSize = Annotated[int, Range(1, 2**24)]
"""The number of images in a batch."""
Precision = Literal["float32", "bfloat16", "float16"]
"""The dtype of a computation."""


@dataclass(frozen=True)
class TrainConfig:
    """How much, and over what batches."""

    batch_size: BatchSize = 256
    """Global: divided among all devices of all processes."""
    duration: Duration = field(default_factory=lambda: Duration.parse("90 epochs"))
    """Length of the run: "90 epochs", "5000 steps" or "1_000_000 examples"."""
    label_smoothing: Decay = 0.0
    """The share of each label that is spread evenly over all classes, in training alone."""
    accumulate: Annotated[int, Range(1, 65_536)] = 1
    """Compute each device's share of a batch in this many microbatches, one after the other, to save memory. With
    batch norm local, a microbatch is what is normalized together."""
    precision: Precision | None = None
    """Of the computation; parameters, batch statistics and loss stay float32. Where absent, float32 on a CPU and
    bfloat16 on a GPU. In float16 the loss is scaled, by as much as its gradients bear."""
    gradient_precision: Literal["bfloat16"] | None = None
    """In which gradients travel between devices: half of the bytes, with a rounding of each. Their own where absent."""
    max_bad_steps: Annotated[int, Range(0, 1_000_000)] = 10
    """A step whose gradient is not finite changes nothing; after so many in a row the run ends. 0 leaves the guard out:
    such a step is taken, and the run ends. In float16 it stays, and the first that no loss scale mends ends the run."""
    ema: Decay | None = None
    """The decay of an exponential moving average of the parameters, 0.999, which is validated beside them as "val_ema",
    and which predict, export and serve in place of them. None where absent."""
    ema_warmup: bool = True
    """The decay of step t is at most (1 + t)/(10 + t), so that the average soon forgets the fresh parameters."""
    ema_every: Period = 1
    """The average moves after every so many steps, with the decay to that power."""
    lookahead: Period | None = None
    """After every so many steps (5) training goes on from slow weights that follow it. None where absent."""
    lookahead_decay: Share = 0.5
    """The share of the slow weights that stays then."""
    stop_after: Period | None = None
    """Stop after so many validations in a row without gain in `checkpoint.best`; never where absent."""
    stop_min_gain: Factor = 0.0
    """What is a gain for `stop_after`: to be better by more than this."""
