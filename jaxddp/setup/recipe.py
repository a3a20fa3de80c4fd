"""The recipe of a run: all objects that determine its result, except the data and the devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import optax

from jaxddp.augment.preprocess import Augmentation, Preprocess, check_augmentation
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import kind_of
from jaxddp.engine.example_loss import ExampleLoss, example_loss
from jaxddp.engine.initial_state import Transform
from jaxddp.engine.objective import Metric, Objective, SetMetric, TrainObjective, supervised
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.part import Part
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt, with_cpu_convolutions
from jaxddp.models.interface import Model
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import MODELS, OBJECTIVES, OPTIMIZERS
from jaxddp.schedules.peak import at_batch_size
from jaxddp.schedules.warmup import Steps, make_schedule
from jaxddp.sections.goal import Goal
from jaxddp.setup.configured_losses import configured_losses
from jaxddp.setup.configured_metrics import configured_metrics, with_user_metrics
from jaxddp.setup.layout import ImageShape, Layout, TrainingData
from jaxddp.setup.network_checks import NetworkCheck, brings_weights, check_other_seed, in_precision
from jaxddp.setup.user_objects import ObjectSource, check_optimizer, check_parts


@dataclass(frozen=True)
class Recipe:
    """All objects that determine the result of a training, except the data and the devices.

    Attributes:
        loss: the loss of training.
        eval_loss: the loss of evaluation, with class weights and without label smoothing.
        objective: a function that takes the supervised objective, which includes the loss, and returns the function
            that a step minimizes.
        kernels: the kernels of the network.
        metrics: metrics in addition to the loss, by name.
        augmentation: a function that augments one image after the config's augmentation.
        parts: optional parts of the step.
        initialize: a function of the initial (params, model_state) that returns new ones.
        learning_rate: the schedule of the optimizer, for logs; None if it is unknown.
        schedule: a function of the step number, from 0. The optimizer's updates are multiplied by its result.
    """

    config: Config = field(repr=False)
    model: Model
    optimizer: optax.GradientTransformation = field(repr=False)
    loss: ExampleLoss
    eval_loss: ExampleLoss
    objective: Callable[[Objective], TrainObjective] = supervised
    kernels: Kernels = BY_NAME
    metrics: Mapping[str, Metric | SetMetric] = field(default_factory=dict)
    augmentation: Augmentation | None = None
    parts: tuple[Part, ...] = ()
    initialize: Transform | None = None
    learning_rate: optax.Schedule | None = None
    schedule: optax.Schedule | None = None

    @property
    def goal(self) -> Goal:
        """The metric, the direction and the smoothing by which validations are compared."""
        return self.config.checkpoint.goal(averages=any(part.beside for part in self.parts))

    def minimized(self, supervised: Objective) -> TrainObjective:
        """Return the function that a step minimizes. Raises: InputError if the objective returned no function."""
        train_objective = self.objective(supervised)
        if not callable(train_objective):
            raise InputError(
                f"objective: it returned {kind_of(train_objective)}; return a function (params, model_state, batch, …)"
            )
        return train_objective


def make_recipe(
    config: Config,
    layout: Layout,
    topology: Topology,
    user_object: ObjectSource,
    rate: optax.Schedule | None = None,
    *,
    precision: str | None = None,
) -> Recipe:
    """Make the recipe of a config and of the objects that the user provides.

    Args:
        config: the config, with all values resolved, such as the precision.
        user_object: the source of the user's objects.
        rate: a learning rate schedule, which replaces the config's.
        precision: the `train.precision` that the user set; None for a default.

    Raises:
        InputError: a name is unknown, a number is out of range, or an object is of the wrong type. The message names
            the key, the hook or the argument.
    """
    data, schedule = layout.training_data, rate or make_schedule(config, layout.steps)
    loss, eval_loss = losses_of(config, data, user_object)
    model = model_of(config, data.num_classes, user_object, data.image_shape, NetworkCheck(topology, precision))
    optimizer, kernels, uses_schedule = _optimizer(config, schedule, model, data.image_shape, user_object)
    initialize = user_object("initialize", config, data.images)
    if initialize is None and config.model.weights is None:
        _check_other_seed(model, config, data.num_classes, user_object)
    return Recipe(
        config=config,
        model=model,
        kernels=kernels,
        optimizer=optimizer,
        loss=loss,
        eval_loss=eval_loss,
        objective=_objective(config, topology, user_object),
        metrics=metrics_of(config, data, user_object),
        augmentation=_augmentation(config, layout, user_object),
        parts=parts_of(config, layout.steps, user_object),
        initialize=initialize and initialize.function("(params, model_state)", "params, model_state"),
        learning_rate=schedule if uses_schedule else None,
    )


def model_of(
    config: Config,
    num_classes: int,
    user_object: ObjectSource,
    image_shape: ImageShape | None = None,
    check: NetworkCheck | None = None,
) -> Model:
    """Make the network. Raises: InputError.

    Args:
        image_shape: the shape of the images, from which it is decided whether a user's network is cast to
            `train.precision`; see `in_precision`. None if the network only gives names and shapes of arrays.
        check: the check of a user's network before training.
    """
    custom = user_object("model", config, num_classes)
    if custom is None:
        # A built-in network has `num_classes` outputs.
        built_in = adapt(MODELS.get(config.model.name)(config, num_classes))
        return with_cpu_convolutions(built_in, allowed=config.model.cpu_convolutions)
    with custom.named_in_errors():
        model = with_cpu_convolutions(adapt(custom.value), allowed=config.model.cpu_convolutions)
        if image_shape is not None:
            model = in_precision(model, image_shape, config.train.precision)
        if image_shape is not None and check is not None:
            check(model, custom.where, config, image_shape, num_classes)
    return model


def _check_other_seed(model: Model, config: Config, num_classes: int, user_object: ObjectSource) -> None:
    """Check that a hook returns another NNX module for the default seed. Raises: InputError."""
    if config.seed == Config().seed or not brings_weights(model):
        return
    other = user_object("model", config.replace(seed=Config().seed), num_classes)
    if other is not None and other.hook is not None:
        with other.named_in_errors():
            check_other_seed(model, adapt(other.value), config.seed)


def losses_of(config: Config, data: TrainingData, user_object: ObjectSource) -> tuple[ExampleLoss, ExampleLoss]:
    """Make the loss of training and the loss of evaluation. Raises: InputError."""
    custom = user_object("loss", config)
    if custom is None:
        return configured_losses(config, data.labels, data.class_counts, data.num_examples)
    reads_weights = custom.hook is not None and "loss.class_weights" in custom.hook.read
    if config.loss.class_weights is not None and not reads_weights:
        raise InputError(
            Key.plain("loss.class_weights", config.loss.class_weights),
            f": {custom.where} gives a loss, which has its own weights",
            advice="leave it out",
        )
    with custom.named_in_errors():
        loss = example_loss(custom.value, data.labels)
    return loss, loss


def metrics_of(config: Config, data: TrainingData, user_object: ObjectSource) -> Mapping[str, Metric | SetMetric]:
    """Make the metrics in addition to the loss, by name. Raises: InputError."""
    metrics = configured_metrics(config, data.labels)
    custom = user_object("metrics", config)
    if custom is None:
        return metrics
    return with_user_metrics(metrics, custom.value, custom.where, data.labels)


def parts_of(config: Config, steps: Steps, user_object: ObjectSource) -> tuple[Part, ...]:
    """Make the parts of the step. Raises: InputError."""
    configured, custom = configured_parts(config, steps.total), user_object("parts", config, steps)
    return configured if custom is None else check_parts(custom.value, custom.where, configured)


def _kernels(model: Model, image_shape: ImageShape) -> Kernels:
    """Return the kernels of a network. Those of built-in networks are known without a trace, by their names."""
    is_built_in = type(getattr(model, "module", None)).__module__.startswith("jaxddp.models.")
    arrays = None if is_built_in else getattr(model, "layer_arrays", None)
    return BY_NAME if arrays is None else Kernels.of_layers(arrays(image_shape))


def _optimizer(
    config: Config, rate: optax.Schedule, model: Model, image_shape: ImageShape, user_object: ObjectSource
) -> tuple[optax.GradientTransformation, Kernels, bool]:
    """Return the optimizer, the kernels for it, and whether it uses the learning rate schedule `rate`."""
    arguments = at_batch_size(config), rate
    custom = user_object("optimizer", *arguments)
    if custom is not None:
        return check_optimizer(custom.value, custom.where, config), BY_NAME, custom.hook is not None
    kernels = _kernels(model, image_shape)
    return OPTIMIZERS.get(config.optimizer.name)(*arguments, kernels), kernels, True


def _objective(config: Config, topology: Topology, user_object: ObjectSource) -> Callable[[Objective], TrainObjective]:
    custom = user_object("objective", config, topology)
    if custom is None:
        return OBJECTIVES.get(config.objective.name)(config, topology)
    return custom.function("(objective)" if custom.hook else "the supervised objective, or a name", "supervised")


def _augmentation(config: Config, layout: Layout, user_object: ObjectSource) -> Augmentation | None:
    """Make the user's augmentation, and check it on images of all sizes.

    The check leaves out all other augmentations, so that an error names the hook or the argument.
    """
    custom = user_object("augmentation", config)
    if custom is None:
        return None
    function = custom.function("(key, image)", "key, image")
    only_custom = Preprocess.of(config, extra=function)
    with custom.named_in_errors():
        for shape in layout.shapes:
            check_augmentation(only_custom, shape, layout.training_data.dtype)
    return function
