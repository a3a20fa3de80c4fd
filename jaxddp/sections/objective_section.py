"""The `objective` section of a config: the function that a training step minimizes."""

from dataclasses import dataclass
from typing import Annotated

from jaxddp.core.ranges import Factor, Range, Share
from jaxddp.sections.data_section import RandAugment, RandMagnitude

Temperature = Annotated[float, Range(0, 1000, above=True)]
Ratio = Annotated[int, Range(1, 1024)]
UNLABELLED_RATIO = 7
"""The default of `unlabelled_ratio`, for all objectives that read unlabelled images."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The function that a training step minimizes. It includes the loss."""

    # A key that only some objectives read is None by default; each of these objectives has its own default.

    name: str = "supervised"
    """Name of an objective in jaxddp/objectives/: "supervised" (the loss on the labels), "distillation",
    "fixmatch" or "jensen_shannon"."""
    teacher: str | None = None
    """Distillation: the work directory of the run that is the teacher. Its best checkpoint is used."""
    temperature: Temperature | None = None
    """Distillation: the logits of teacher and student are divided by this before they are compared."""
    teacher_share: Share | None = None
    """Distillation: the weight of the teacher's part of the loss; the loss on the labels has the weight 1 minus
    this."""
    unlabelled_ratio: Ratio | None = None
    """FixMatch: number of unlabelled images (`data.unlabelled`) in a step for each labelled image."""
    unlabelled_weight: Factor | None = None
    """FixMatch: weight of the loss on the unlabelled images."""
    threshold: Share | None = None
    """FixMatch: lowest probability at which the class of a weakly augmented image becomes its pseudo-label."""
    strong_rand_augment: RandAugment | None = None
    """FixMatch: number of RandAugment layers of the strong augmentation, instead of `data.augment.rand_augment`."""
    strong_rand_magnitude: RandMagnitude | None = None
    """FixMatch: strength of the operations of the strong augmentation, from 0 to 10."""
    consistency_weight: Factor | None = None
    """Jensen-Shannon: weight of the divergence of the predictions for an image and two augmented copies."""
    strong_cutout: Share | None = None
    """FixMatch: side of the black square of the strong augmentation, as a fraction of the image's shorter side; 0 for
    none."""
