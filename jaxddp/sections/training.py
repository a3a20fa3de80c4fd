"""The part of a config that says how much is trained, over what batches, and what is minimized."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from jaxddp.duration import Duration
from jaxddp.errors import InputError
from jaxddp.message import Key
from jaxddp.overrides import checked
from jaxddp.ranges import Decay, Factor, Period, Positive, Range, Share, real_number
from jaxddp.sections.examples import RandAugment, RandMagnitude
from jaxddp.wording import show

BatchSize = Annotated[int, Range(1, 2**24)]
Precision = Literal["float32", "bfloat16", "float16"]
Temperature = Annotated[float, Range(0, 1000, above=True)]
Ratio = Annotated[int, Range(1, 1024)]
BALANCED: Literal["balanced"] = "balanced"


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


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a step minimizes, of which the loss is a part."""

    # A key that only some objectives read is None until it is said: they have their own value for it.

    name: str = "supervised"
    """Of an objective of jaxddp/objectives/: the loss of the labels ("supervised"), "distillation" or "fixmatch"."""
    teacher: str | None = None
    """Distillation: the work directory of the run to learn from, of which the best checkpoint is taken."""
    temperature: Temperature | None = None
    """Distillation: what the logits of both are divided by before they are compared."""
    teacher_share: Share | None = None
    """Distillation: what the teacher's part of the loss is multiplied by; that of the labels has the rest."""
    unlabelled_ratio: Ratio | None = None
    """Of "fixmatch": how many unlabelled images (`data.unlabelled`) a step takes for each labelled one."""
    unlabelled_weight: Factor | None = None
    """Of "fixmatch": what the loss of the unlabelled images is multiplied by."""
    threshold: Share | None = None
    """Of "fixmatch": the probability from which on the class of a weakly augmented image is its pseudo-label."""
    strong_rand_augment: RandAugment | None = None
    """Of "fixmatch": layers of RandAugment in the strongly augmented image, in place of `data.augment.rand_augment`."""
    strong_rand_magnitude: RandMagnitude | None = None
    """Of "fixmatch": how strong its operations are, 0 to 10."""
    strong_cutout: Share | None = None
    """Of "fixmatch": the side of the black square in it, as a share of the image's shorter side; 0 none."""


@dataclass(frozen=True)
class LossConfig:
    """How logits are judged by labels."""

    name: str = "cross_entropy"
    """Of a loss of jaxddp/losses/: "cross_entropy", "nll" of log-probabilities, or "bce" of each class by itself."""
    class_weights: str | None = None
    """How much each class counts: "1,4,0.5", a number above 0 for each in its order, or "balanced", N / (K n_k) for a
    class with n_k of the N training images. Evaluation weighs its loss alike."""

    @cached_property
    def weights(self) -> Literal["balanced"] | tuple[float, ...] | None:
        """What `class_weights` says. Raises: InputError; it says nothing."""
        if self.class_weights is None or self.class_weights == BALANCED:
            return self.class_weights
        key = "loss.class_weights"
        return tuple(checked(_number(word, key), Positive, key) for word in self.class_weights.split(","))


def _number(word: str, key: str) -> float:
    try:
        return real_number(word)
    except ValueError:
        told = f": {show(word)} is no number"
        raise InputError(Key(key), told, advice=f"give {BALANCED!r}, or a number for each class") from None
