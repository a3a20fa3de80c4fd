"""The part of a config that says how much is trained, over what batches, and what is minimized."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxddp.duration import Duration
from jaxddp.ranges import Range, Share

BatchSize = Annotated[int, Range(1, 2**24)]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TrainConfig:
    """How much, and over what batches."""

    batch_size: BatchSize = 256
    """Global: divided among all devices of all processes."""
    duration: Duration = field(default_factory=lambda: Duration.parse("90 epochs"))
    label_smoothing: Annotated[float, Range(0, 1, below=True)] = 0.0
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


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a step minimizes, of which the loss is a part."""

    name: str = "supervised"
    unlabelled_ratio: Annotated[int, Range(1, 1024)] = 7
    """How many unlabelled images (`data.unlabelled`) a step takes for each labelled one."""
    unlabelled_weight: Annotated[float, Range(0, 1_000_000)] = 1.0
    """Of "fixmatch": what the loss of the unlabelled images is multiplied by."""
    threshold: Share = 0.95
    """Of "fixmatch": the probability from which on the class of a weakly augmented image is its pseudo-label."""
    strong_rand_augment: Annotated[int, Range(0, 100)] = 2
    strong_rand_magnitude: Annotated[float, Range(0, 10)] = 10.0
    """Of "fixmatch": in the strongly augmented image, these take the place of what `data.augment` has."""
    strong_cutout: Share = 0.5
    """Of "fixmatch": the side of the black square in it, as a share of the image's shorter side; 0 none."""


@dataclass(frozen=True)
class LossConfig:
    """How logits are judged by labels."""

    name: str = "cross_entropy"
