"""The objectives by name, with their settings. Each imports its module when it is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from jaxddp.config.data_section import UNLABELLED_RATIO, RandAugment, RandMagnitude
from jaxddp.config.registry import OBJECTIVES, Requires
from jaxddp.core.ranges import Factor, Range, Share

if TYPE_CHECKING:
    from jaxddp.config import Config
    from jaxddp.engine.objective import Objective, TrainObjective

Made = Callable[["Objective"], "TrainObjective"]


@OBJECTIVES.add("supervised")
def supervised(config: "Config", topology: Any) -> Made:
    """Return supervised learning: the objective is the recipe's loss of the examples' labels."""
    from jaxddp.engine.objective import supervised

    return supervised


@OBJECTIVES.add("distillation")
@dataclass(frozen=True)
class DistillationSettings:
    """A student learns from labels and from a trained teacher's predictions on the same images."""

    teacher: Annotated[
        str | None, "Distillation: the work directory of the run that is the teacher. Its best checkpoint is used."
    ] = None
    temperature: Annotated[
        float,
        Range(0, 1000, above=True),
        "Distillation: the logits of teacher and student are divided by this before they are compared.",
    ] = 4.0
    teacher_share: Annotated[
        Share,
        "Distillation: the weight of the teacher's part of the loss; the loss on the labels has the weight 1 minus "
        "this.",
    ] = 0.9

    def make(self, config: "Config", topology: Any) -> Made:
        from jaxddp.objectives.distillation import distillation_of

        return distillation_of(self, config, topology)


@OBJECTIVES.add("fixmatch")
@dataclass(frozen=True)
class FixMatchSettings:
    """A confident prediction for an unlabelled image is the label of a strongly augmented copy of the image.

    The defaults are the paper's.
    """

    unlabelled_ratio: Annotated[
        int,
        Range(1, 1024),
        "FixMatch: number of unlabelled images (`data.unlabelled`) in a step for each labelled image.",
    ] = UNLABELLED_RATIO
    unlabelled_weight: Annotated[Factor, "FixMatch: weight of the loss on the unlabelled images."] = 1.0
    threshold: Annotated[
        Share,
        "FixMatch: lowest probability at which the class of a weakly augmented image becomes its pseudo-label.",
    ] = 0.95
    strong_rand_augment: Annotated[
        RandAugment,
        "FixMatch: number of RandAugment layers of the strong augmentation, instead of `data.augment.rand_augment`.",
    ] = 2
    strong_rand_magnitude: Annotated[
        RandMagnitude,
        Requires("objective.strong_rand_augment"),
        "FixMatch: strength of the operations of the strong augmentation, from 0 to 10.",
    ] = 10.0
    strong_cutout: Annotated[
        Share,
        "FixMatch: side of the black square of the strong augmentation, as a fraction of the image's shorter side; 0 "
        "for none.",
    ] = 0.5

    def make(self, config: "Config", topology: Any) -> Made:
        from jaxddp.objectives.fixmatch import FixMatch

        return FixMatch(self)


@OBJECTIVES.add("jensen_shannon")
@dataclass(frozen=True)
class JensenShannonSettings:
    """Predictions for an image and for two augmented copies of it should agree. The default is the paper's."""

    consistency_weight: Annotated[
        Factor,
        "Jensen-Shannon: weight of the divergence of the predictions for an image and two augmented copies.",
    ] = 12.0

    def make(self, config: "Config", topology: Any) -> Made:
        from jaxddp.objectives.jensen_shannon import JensenShannon

        return JensenShannon(self.consistency_weight)
