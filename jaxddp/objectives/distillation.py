"""Distillation: a student learns from labels and from a trained teacher's predictions on the same images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp

from jaxddp.config import Config
from jaxddp.config.layers import SIMSIAM
from jaxddp.config.registry import OBJECTIVES
from jaxddp.config.values import checked
from jaxddp.core import files
from jaxddp.core.errors import InputError, Key, about, counted, refused
from jaxddp.data.batch import Batch
from jaxddp.data.source import check_one_label, labels_of
from jaxddp.engine.objective import MetricSums, Objective, TrainObjective
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import Topology, device_axes
from jaxddp.models.adapt import for_platform
from jaxddp.setup.identity import checksum
from jaxddp.setup.network_checks import reason_of_rejection
from jaxddp.setup.recipe import Recipe
from jaxddp.workdir.signature import NORMALIZED, Signature

_KEY = Key("objective.teacher")


@dataclass(frozen=True, eq=False)
class Distillation:
    """Minimizes (1 - share) loss + share T^2 KL(teacher || student) (Hinton et al. 2015, arXiv:1503.02531).

    The loss is the recipe's loss. If the loss weights examples, the divergences have the same weights. The teacher gets
    the student's augmented and mixed images, normalized by the teacher's mean and std. The teacher runs in evaluation
    mode, with its running statistics, and has no gradient.

    Attributes:
        restore: a function that returns the teacher, a trained run on the same devices. It is called on first use.
        temperature: T, by which all logits are divided.
        teacher_share: the weight of the divergence, from 0 (labels only) to 1.
    """

    restore: Callable[[], TrainedRun]
    temperature: float = 4.0
    teacher_share: float = 0.9

    @cached_property
    def teacher(self) -> TrainedRun:
        """Return the teacher, which is restored on first use. Raises: InputError if the teacher cannot be read."""
        with about(_KEY):
            return self.restore()

    @cached_property
    def _checksum(self) -> str:
        return checksum((self.teacher.state.params, self.teacher.state.model_state))

    reads_unlabelled = False
    """Whether a batch must contain images of `data.unlabelled`."""

    def fingerprints(self, recipe: Recipe) -> dict[str, str]:
        """Return the teacher's checksum. Raises: InputError if it is missing or does not fit the data and devices."""
        if recipe.config.parallel.reproducible:
            problem = ": distillation does not give the same bits on any number of devices"
            raise InputError(Key("parallel.reproducible"), problem, advice="leave one of them out")
        signature, topology = Signature.of(recipe.resources.train, recipe.config.data), recipe.topology
        check_one_label(labels_of(recipe.resources.train), Key.plain("objective.name", "distillation"))
        teacher, expected = self.teacher, self.teacher.signature
        trees = teacher.state.params, teacher.state.model_state
        if teacher.config.objective.name == SIMSIAM:
            raise self._unfit("has an untrained head, because it learned without labels", "give a run with labels")
        if expected.class_ids != signature.class_ids:
            raise self._unfit("was trained on other classes", "give a run on the classes of this data set")
        if expected.image_shape != signature.image_shape:
            problem = f"was trained on images of {expected.image_shape}, and this run has {signature.image_shape}"
            raise self._unfit(problem, "use the same size for both")
        if NORMALIZED in (expected.dtype, signature.dtype) and expected.dtype != signature.dtype:
            problem = f"was trained on {expected.dtype} images, and this run has {signature.dtype} images"
            raise self._unfit(problem, "normalize the images of both, or of none")
        for shape in recipe.layout.shapes:
            if reason := reason_of_rejection(teacher.model, trees, expected.image_shape, shape):
                problem = f"does not take this run's training images of {shape} ({reason})"
                raise self._unfit(problem, "give a teacher that takes them")
        if teacher.topology.mesh != topology.mesh:
            devices = counted(teacher.topology.num_devices, "device")
            problem = f"is loaded on {devices}, and this run uses {topology.num_devices}"
            raise self._unfit(problem, "load it with the same devices=")
        return {"teacher": self._checksum}

    def _unfit(self, problem: str, advice: str) -> InputError:
        return InputError(_KEY, f": {self.teacher.directory} {problem}", advice=advice)

    def __call__(self, supervised: Objective) -> TrainObjective:
        """Return the training objective; see `jaxddp.config.registry.OBJECTIVES`."""

        def objective(
            params: Any, model_state: Any, batch: Batch, *, train: bool, key: Any = None, image_key: Any = None
        ) -> tuple[MetricSums, Any]:
            images, mixing = supervised.preprocess(batch, train=train, key=image_key)
            views = [(batch, image_key)]
            logits, model_state = supervised.logits(params, model_state, images, views, train=train, key=key)
            (values, weights), *metrics = supervised.columns(logits, batch, mixing)
            divergence = self.divergence(self.teacher_logits(images, supervised), logits)
            values = (1 - self.teacher_share) * values + self.teacher_share * weights * divergence
            return supervised.sums([(values, weights), *metrics], batch), model_state

        return objective

    def divergence(self, teacher: jax.Array, student: jax.Array) -> jax.Array:
        """Return T^2 KL(teacher || student) of each example, float[B], from logits float[B, K].

        The factor T^2 keeps the size of the gradients independent of the temperature.
        """
        teacher_log = jax.nn.log_softmax(teacher.astype(student.dtype) / self.temperature)
        student_log = jax.nn.log_softmax(student / self.temperature)
        return self.temperature**2 * (jnp.exp(teacher_log) * (teacher_log - student_log)).sum(-1)

    def teacher_logits(self, images: jax.Array, supervised: Objective) -> jax.Array:
        """Return the teacher's logits, float[B, K], without a gradient, for images in the student's normalization."""
        teacher, channels = self.teacher, images.shape[-1]
        target, source = teacher.preprocess, supervised.preprocess
        if (target.mean, target.std) != (source.mean, source.std):
            constants = (source.mean, source.std, target.mean, target.std)
            mean, std, teacher_mean, teacher_std = (jnp.array(each[:channels], images.dtype) for each in constants)
            images = images * (std / teacher_std) + (mean - teacher_mean) / teacher_std
        model = for_platform(teacher.model, teacher.topology.platform)
        # The devices of the program are all devices, or one device in the self-test.
        arrays = teacher.state.params, teacher.state.model_state
        if jax.lax.axis_size(device_axes()) != teacher.topology.num_devices:
            arrays = jax.tree.map(lambda array: array.addressable_data(0), arrays)
        params, model_state = arrays
        logits, _ = model.apply(params, model_state, images.astype(target.dtype), train=False, key=None)
        return jax.lax.stop_gradient(logits)


def distillation(teacher: TrainedRun, temperature: float = 4.0, teacher_share: float = 0.9) -> Distillation:
    """Create a `Distillation` from a loaded run, for `prepare_training(…, objective=…)` or a `get_objective` hook.

    Args:
        teacher: the result of `jaxddp.load_run`.
        temperature: the temperature T, by which all logits are divided.
        teacher_share: the weight of the divergence, from 0 (labels only) to 1.

    Raises:
        InputError: an argument has the wrong type or is out of range.
    """
    if not isinstance(teacher, TrainedRun):
        raise refused("teacher", teacher, "give what jaxddp.load_run returns")
    types = get_type_hints(OBJECTIVES.choice("distillation"), include_extras=True)
    values = {"temperature": temperature, "teacher_share": teacher_share}
    return Distillation(lambda: teacher, **{name: checked(value, types[name], name) for name, value in values.items()})


def best_of_run(teacher: str | None, config: Config, topology: Topology) -> Callable[[], TrainedRun]:
    """Return a function that restores a run's best checkpoint as a teacher. Raises: InputError if no teacher is set."""
    if teacher is None:
        raise InputError(_KEY, ": distillation has no teacher", advice="give a run's work directory")
    return partial(restore_run, files.expanded(teacher), "best", topology, precision=config.train.precision)
