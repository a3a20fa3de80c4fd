"""The objectives by name, with their settings. Each imports its module when it is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from jaxddp.config.data_section import UNLABELLED_RATIO, RandAugment, RandMagnitude
from jaxddp.config.layers import SIMSIAM
from jaxddp.config.registry import OBJECTIVES, Requires
from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Factor, Range, Share

if TYPE_CHECKING:
    from jaxddp.config import Config
    from jaxddp.engine.objective import Objective, TrainObjective
    from jaxddp.mesh import Topology

Made = Callable[["Objective"], "TrainObjective"]


@OBJECTIVES.add("supervised")
def supervised(config: "Config", topology: "Topology") -> Made:
    """Return supervised learning: the objective is the recipe's loss of the examples' labels."""
    from jaxddp.engine.objective import supervised

    return supervised


@OBJECTIVES.add("distillation")
@dataclass(frozen=True)
class DistillationSettings:
    """A student learns from labels and from a trained teacher's predictions on the same images."""

    teacher: str | None = None
    """Distillation: the work directory of the run that is the teacher. Its best checkpoint is used."""
    temperature: Annotated[float, Range(0, 1000, above=True)] = 4.0
    """Distillation: the logits of teacher and student are divided by this before they are compared."""
    teacher_share: Share = 0.9
    """Distillation: the weight of the teacher's part of the loss; the loss on the labels has the weight 1 minus
    this."""

    def make(self, config: "Config", topology: "Topology") -> Made:
        from jaxddp.objectives.distillation import Distillation, best_of_run

        return Distillation(best_of_run(self.teacher, config, topology), self.temperature, self.teacher_share)


@OBJECTIVES.add("fixmatch")
@dataclass(frozen=True)
class FixMatchSettings:
    """A confident prediction for an unlabelled image is the label of a strongly augmented copy of the image.

    The defaults are the paper's.
    """

    unlabelled_ratio: Annotated[int, Range(1, 1024)] = UNLABELLED_RATIO
    """FixMatch: number of unlabelled images (`data.unlabelled`) in a step for each labelled image."""
    unlabelled_weight: Factor = 1.0
    """FixMatch: weight of the loss on the unlabelled images."""
    threshold: Share = 0.95
    """FixMatch: lowest probability at which the class of a weakly augmented image becomes its pseudo-label."""
    strong_rand_augment: RandAugment = 2
    """FixMatch: number of RandAugment layers of the strong augmentation, instead of `data.augment.rand_augment`."""
    strong_rand_magnitude: Annotated[RandMagnitude, Requires("objective.strong_rand_augment")] = 10.0
    """FixMatch: strength of the operations of the strong augmentation, from 0 to 10."""
    strong_cutout: Share = 0.5
    """FixMatch: side of the black square of the strong augmentation, as a fraction of the image's shorter side; 0 for
    none."""

    def make(self, config: "Config", topology: "Topology") -> Made:
        from jaxddp.objectives.fixmatch import FixMatch

        strong = self.strong_rand_augment, self.strong_rand_magnitude, self.strong_cutout
        return FixMatch(self.unlabelled_weight, self.threshold, *strong)


@OBJECTIVES.add(SIMSIAM)
@dataclass(frozen=True)
class SimSiamSettings:
    """Two augmented copies of an image should have similar features. Labels are not used.

    The defaults are the paper's.
    """

    projector_layers: Annotated[int, Range(1, 16)] = 3
    """SimSiam: number of dense layers of the projector."""
    projector_width: Annotated[int, Range(1, 65_536)] = 2048
    """SimSiam: width of each layer of the projector, and of the outputs that are compared."""
    predictor_width: Annotated[int, Range(1, 65_536)] = 512
    """SimSiam: width of the hidden layer of the predictor."""

    def make(self, config: "Config", topology: "Topology") -> Made:
        from jaxddp.mesh import AXIS
        from jaxddp.models.projection import Projection
        from jaxddp.objectives.simsiam import SimSiam

        if config.data.placement == "local":
            both = Key.plain("objective.name", SIMSIAM), " with ", Key.plain("data.placement", "local")
            raise InputError(*both, ": a validation compares the images of all processes", advice="share them")
        # The shards of a reproducible step, and unequal slices, are computed separately.
        separate = config.parallel.reproducible or config.parallel.shares is not None
        projection = Projection(self.projector_layers, self.projector_width, self.predictor_width)
        return SimSiam(projection, None if separate else AXIS)


@OBJECTIVES.add("jensen_shannon")
@dataclass(frozen=True)
class JensenShannonSettings:
    """Predictions for an image and for two augmented copies of it should agree. The default is the paper's."""

    consistency_weight: Factor = 12.0
    """Jensen-Shannon: weight of the divergence of the predictions for an image and two augmented copies."""

    def make(self, config: "Config", topology: "Topology") -> Made:
        from jaxddp.objectives.jensen_shannon import JensenShannon

        return JensenShannon(self.consistency_weight)
