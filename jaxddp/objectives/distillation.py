"""Distillation: the student learns from labels, and from what a trained network says of the same images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError, about, refused
from jaxddp.core.message import Key
from jaxddp.core.ranges import Share
from jaxddp.data.batch import Batch
from jaxddp.engine.step_objective import MetricSums, Objective, TrainObjective
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.adapt import for_platform
from jaxddp.overrides import checked
from jaxddp.recipe.layout import Layout
from jaxddp.recipe.network_checks import refusal_of
from jaxddp.registry import OBJECTIVES
from jaxddp.sections.objective_section import Temperature
from jaxddp.setup.resources import Resources
from jaxddp.workdir.digests import checksum
from jaxddp.workdir.signature import Signature

_KEY = Key("objective.teacher")
_OWN = (_KEY, ": ")


@dataclass(frozen=True)
class DistillationSettings:
    """Of `objective`."""

    teacher: str | None = None
    temperature: Temperature = 4.0
    teacher_share: Share = 0.9


@dataclass(frozen=True, eq=False)
class Distillation:
    """(1 - share) loss + share T^2 KL(teacher || student) at temperature T (Hinton et al. 2015, arXiv:1503.02531).

    The loss is the recipe's own. A loss that weighs its examples weighs their divergences alike. The teacher is given
    the very images of the student, augmented and mixed, by its own mean and std; it uses its running statistics, and
    has no gradient.

    Attributes:
        restore: gives the teacher, a trained run on the devices of this one, when it is first needed.
        temperature: T, by which all logits are divided.
        teacher_share: from 0, the loss of the labels alone, to 1.
    """

    restore: Callable[[], TrainedRun]
    temperature: float = 4.0
    teacher_share: float = 0.9

    @cached_property
    def teacher(self) -> TrainedRun:
        """Restored once. Raises: InputError; there is no such run or checkpoint."""
        with about(_KEY):
            return self.restore()

    reads_unlabelled = False
    """Whether a batch needs images of `data.unlabelled`."""

    def fingerprints(self, config: Config, resources: Resources, layout: Layout) -> dict[str, str]:
        """What tells the teacher from others, once it is seen to suit the classes, images and devices of a run.

        Raises: InputError; it does not, or there is none.
        """
        if config.parallel.reproducible:
            raise InputError(
                Key("parallel.reproducible"),
                ": distillation gives other bits on other numbers of devices",
                advice="leave one of them out",
            )
        signature, topology = Signature.of(resources.train, config.data), resources.topology
        if signature.multi_label:
            raise InputError(
                Key.plain("objective.name", "distillation"),
                " takes one label an image, and the training data have several",
            )
        teacher, own = self.teacher, self.teacher.signature
        if own.class_ids != signature.class_ids:
            raise InputError(
                *(_OWN, f"{teacher.directory} was trained on other classes"),
                advice="give a run on this data set's",
            )
        if own.image_shape != signature.image_shape:
            raise InputError(
                *(_OWN, f"{teacher.directory} was trained on images of {own.image_shape}, and this run has "),
                f"{signature.image_shape}",
                advice="give them one size",
            )
        trees = teacher.state.params, teacher.state.model_state
        for shape in layout.shapes:
            if why := refusal_of(teacher.model, trees, own.image_shape, shape):
                raise InputError(
                    *(_OWN, f"{teacher.directory} does not take the images of {shape} that are trained on ({why})"),
                    advice="give a teacher that does",
                )
        if teacher.topology.mesh != topology.mesh:
            there, here = teacher.topology.num_devices, topology.num_devices
            raise InputError(
                *(_OWN, f"it lies on {there} device{'s' * (there > 1)}, and this run on {here}"),
                advice="load it with the same devices=",
            )
        return {"teacher": checksum(trees)}

    def __call__(self, supervised: Objective) -> TrainObjective:
        """The objective; see `jaxddp.registry.OBJECTIVES`."""

        def objective(
            params: Any,
            model_state: Any,
            batch: Batch,
            *,
            train: bool,
            key: jax.Array | None = None,
            image_key: jax.Array | None = None,
        ) -> tuple[MetricSums, Any]:
            images, mixing = supervised.preprocess(batch, train=train, key=image_key)
            keys = {"key": key, "image_key": image_key}
            logits, model_state = supervised.logits(params, model_state, images, batch, train=train, **keys)
            (values, weights), *metrics = supervised.columns(logits, batch, mixing)
            divergence = self.divergence(self.teacher_logits(images, supervised), logits)
            values = (1 - self.teacher_share) * values + self.teacher_share * weights * divergence
            return supervised.sums([(values, weights), *metrics], batch), model_state

        return objective

    def divergence(self, teacher: jax.Array, student: jax.Array) -> jax.Array:
        """T^2 KL of each example, float[B], of logits float[B, K]. T^2 keeps gradients as large at any temperature."""
        of_teacher = jax.nn.log_softmax(teacher.astype(student.dtype) / self.temperature)
        of_student = jax.nn.log_softmax(student / self.temperature)
        return self.temperature**2 * (jnp.exp(of_teacher) * (of_teacher - of_student)).sum(-1)

    def teacher_logits(self, images: jax.Array, supervised: Objective) -> jax.Array:
        """What the teacher says of images that are normalized as the student's, without a gradient: float[B, K]."""
        teacher, channels = self.teacher, images.shape[-1]
        own, other = teacher.preprocess, supervised.preprocess
        if (own.mean, own.std) != (other.mean, other.std):
            mean, std = (jnp.array(each[:channels], images.dtype) for each in (other.mean, other.std))
            own_mean, own_std = (jnp.array(each[:channels], images.dtype) for each in (own.mean, own.std))
            images = images * (std / own_std) + (mean - own_mean) / own_std
        model = for_platform(teacher.model, teacher.topology.platform)
        params, model_state = self._arrays()
        logits, _ = model.apply(params, model_state, images.astype(own.dtype), train=False, key=None)
        return lax.stop_gradient(logits)

    def _arrays(self) -> tuple[Any, Any]:
        """The teacher's, on the devices that the program is traced for: all, or one, where the gradient is tested."""
        held = self.teacher.state.params, self.teacher.state.model_state
        if lax.axis_size(AXIS) == self.teacher.topology.num_devices:
            return held
        return jax.tree.map(lambda array: array.addressable_data(0), held)


def distillation(teacher: TrainedRun, temperature: float = 4.0, teacher_share: float = 0.9) -> Distillation:
    """Of a run that was loaded, for `prepare_training(…, objective=…)` and for `get_objective`; see `Distillation`.

    Raises: InputError; an argument is of another kind, or out of range.
    """
    if not isinstance(teacher, TrainedRun):
        raise refused("teacher", teacher, "give what jaxddp.load_run returns")
    kinds = get_type_hints(DistillationSettings, include_extras=True)
    own = {"temperature": temperature, "teacher_share": teacher_share}
    return Distillation(lambda: teacher, **{name: checked(value, kinds[name], name) for name, value in own.items()})


@OBJECTIVES.add("distillation", DistillationSettings)
def distillation_of(config: Config, topology: Topology) -> Distillation:
    """Of the best checkpoint of the run that `objective.teacher` names. Raises: InputError; it names none."""
    own = settings_of(config.objective, DistillationSettings)
    if (place := own.teacher) is None:
        raise InputError(_OWN, "distillation has no teacher", advice="give a run's work directory")

    def restore() -> TrainedRun:
        return restore_run(place, "best", topology, precision=config.train.precision)

    return Distillation(restore, own.temperature, own.teacher_share)
