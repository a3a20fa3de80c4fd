"""The part of a config that says what a step minimizes."""

from dataclasses import dataclass
from typing import Annotated

from jaxddp.core.ranges import Factor, Range, Share
from jaxddp.sections.data_section import RandAugment, RandMagnitude

Temperature = Annotated[float, Range(0, 1000, above=True)]
Ratio = Annotated[int, Range(1, 1024)]


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
