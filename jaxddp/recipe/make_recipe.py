"""A recipe is made: each kind of object by its name in the config, unless the user gives one."""

from collections.abc import Callable, Mapping

import optax

from jaxddp.augment.preprocess import Augmentation, Preprocess, check_augmentation
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.engine.example_loss import ExampleLoss, example_loss
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.part import Part
from jaxddp.engine.set_metrics import SetMetric
from jaxddp.engine.step_objective import Metric, Objective, TrainObjective
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.interface import Model
from jaxddp.recipe.configured_losses import configured_losses
from jaxddp.recipe.configured_metrics import configured_metrics, with_given
from jaxddp.recipe.layout import ImageShape, Layout, TrainingData
from jaxddp.recipe.network_checks import check_outputs
from jaxddp.recipe.object_checks import check_optimizer, check_parts
from jaxddp.recipe.recipe import Recipe
from jaxddp.recipe.user_objects import ObjectSource
from jaxddp.registry import MODELS, OBJECTIVES, OPTIMIZERS
from jaxddp.schedules.peak import at_batch_size
from jaxddp.schedules.warmup import Steps, make_schedule


def make_recipe(
    config: Config, layout: Layout, topology: Topology, give: ObjectSource, rate: optax.Schedule | None = None
) -> Recipe:
    """The recipe of a config that is settled, and of what the user gives.

    Args:
        rate: the learning rate, in place of the config's schedule.

    Raises:
        InputError: a name that is unknown, a number out of range, or an object of another kind than it is given for;
            names the key or who gave it.
    """
    data, followed = layout.training_data, rate or make_schedule(config, layout.steps)
    loss, eval_loss = losses_of(config, data, give)
    optimizer, follows = _optimizer(config, followed, give)
    initialize = give("initialize", config, data.images)
    return Recipe(
        config=config,
        model=model_of(config, data.num_classes, give, data.image_shape),
        optimizer=optimizer,
        loss=loss,
        eval_loss=eval_loss,
        objective=_objective(config, topology, give),
        metrics=metrics_of(config, data, give),
        augmentation=_augmentation(config, layout, give),
        parts=parts_of(config, layout.steps, give),
        initialize=initialize and initialize.function("(params, model_state)", "params, model_state"),
        learning_rate=followed if follows else None,
    )


def model_of(config: Config, num_classes: int, give: ObjectSource, image_shape: ImageShape | None = None) -> Model:
    """The network; one that the user gives is tried on images, where their shape is told. Raises: InputError."""
    given = give("model", config, num_classes)
    if given is None:
        # It has as many outputs as it is told.
        return adapt(MODELS.get(config.model.name)(config, num_classes))
    with given.told():
        model = adapt(given.value)
        if image_shape is not None:
            check_outputs(model, image_shape, num_classes)
    return model


def losses_of(config: Config, data: TrainingData, give: ObjectSource) -> tuple[ExampleLoss, ExampleLoss]:
    """The loss of training, and that of evaluation. Raises: InputError."""
    given = give("loss", config)
    if given is None:
        return configured_losses(config, data.labels, data.class_counts)
    if config.loss.class_weights is not None:
        raise InputError(
            Key.plain("loss.class_weights", config.loss.class_weights),
            f": {given.where} gives a loss, which has its own weights",
            advice="leave it out",
        )
    with given.told():
        loss = example_loss(given.value, data.labels)
    return loss, loss


def metrics_of(config: Config, data: TrainingData, give: ObjectSource) -> Mapping[str, Metric | SetMetric]:
    """What is measured beside the loss. Raises: InputError."""
    metrics = configured_metrics(config, data.labels)
    given = give("metrics", config)
    if given is None:
        return metrics
    return with_given(metrics, given.value, given.where, data.labels)


def parts_of(config: Config, steps: Steps, give: ObjectSource) -> tuple[Part, ...]:
    """The parts of the step. Raises: InputError."""
    configured, given = configured_parts(config, steps.total), give("parts", config, steps)
    return configured if given is None else check_parts(given.value, given.where, configured)


def _optimizer(config: Config, rate: optax.Schedule, give: ObjectSource) -> tuple[optax.GradientTransformation, bool]:
    """The optimizer, and whether it was told of the learning rate."""
    told = at_batch_size(config), rate
    given = give("optimizer", *told)
    if given is None:
        return OPTIMIZERS.get(config.optimizer.name)(*told), True
    return check_optimizer(given.value, given.where, config), given.hook is not None


def _objective(config: Config, topology: Topology, give: ObjectSource) -> Callable[[Objective], TrainObjective]:
    given = give("objective", config, topology)
    if given is None:
        return OBJECTIVES.get(config.objective.name)(config, topology)
    return given.function("(objective)" if given.hook else "the supervised objective, or a name", "supervised")


def _augmentation(config: Config, layout: Layout, give: ObjectSource) -> Augmentation | None:
    """It is tried on images of all sizes by itself, so that what is wrong with it is told of who gave it."""
    given = give("augmentation", config)
    if given is None:
        return None
    function = given.function("(key, image)", "key, image")
    alone = Preprocess.of(config, extra=function)
    with given.told():
        for shape in layout.shapes:
            check_augmentation(alone, shape, layout.training_data.dtype)
    return function
