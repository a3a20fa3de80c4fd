"""What a run trains: the objects that a config names, or that a recipe file or a notebook brings."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import optax

from jaxddp.augment.preprocess import Augmentation
from jaxddp.config import Config, DataConfig, ShownImages
from jaxddp.data.labels import class_counts, is_multi_label
from jaxddp.data.source import Source, sample_images
from jaxddp.engine.loss import ExampleLoss, example_loss
from jaxddp.engine.objective import Metric, Objective, TrainObjective, supervised
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.gradient_norm import GradientNorm
from jaxddp.engine.parts.part import Part
from jaxddp.engine.set_metrics import SetMetric
from jaxddp.engine.state import Transform
from jaxddp.errors import InputError, about
from jaxddp.experiment.chosen_loss import configured_losses
from jaxddp.experiment.chosen_metrics import configured_metrics, with_given
from jaxddp.experiment.outputs import check_outputs
from jaxddp.hooks import Hook, check_called, one_line
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.protocol import Model
from jaxddp.overrides import checked
from jaxddp.recipe_file import RecipeFile
from jaxddp.registry import MODELS, OBJECTIVES, OPTIMIZERS
from jaxddp.schedules.peak import at_batch_size
from jaxddp.schedules.warmup import Steps, make_schedule
from jaxddp.training.events import MOMENTS
from jaxddp.training.plan import Plan
from jaxddp.wording import kind_of

_absent = object()


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training's numbers, but for data and devices.

    Attributes:
        objective: makes what a step minimizes of the supervised objective, which has the loss.
        eval_loss: what evaluation calls the loss: without label smoothing, which is a device of training, and with
            the weights of classes.
        metrics: measured beside the loss, by name.
        augmentation: of one image, after the config's.
        initialize: a transform of the fresh parameters.
        weights: arrays by path, in place of fresh ones; see `jaxddp.experiment.fine_tuning`.
        learning_rate: what the optimizer follows, to be shown; None where that is unknown.
        schedule: multiplies the optimizer's updates, as a function of the step (0 first).
    """

    config: Config = field(repr=False)
    model: Model
    optimizer: optax.GradientTransformation = field(repr=False)
    loss: ExampleLoss
    eval_loss: ExampleLoss
    objective: Callable[[Objective], TrainObjective] = supervised
    metrics: Mapping[str, Metric | SetMetric] = field(default_factory=dict)
    augmentation: Augmentation | None = None
    parts: tuple[Part, ...] = ()
    initialize: Transform | None = None
    weights: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    learning_rate: optax.Schedule | None = None
    schedule: optax.Schedule | None = None

    def minimized(self, supervised: Objective) -> TrainObjective:
        """What a step minimizes. Raises: InputError; the recipe's objective made no function."""
        made = self.objective(supervised)
        if not callable(made):
            raise InputError(
                f"objective: it returned {kind_of(made)}; return a function (params, model_state, batch, …)"
            )
        return made


@dataclass(frozen=True)
class TrainingData:
    """What the objects of a recipe may follow from.

    Attributes:
        class_counts: int64[K], how many examples of each class there are.
        images: gives so many of the training images, [count, H, W, C], or all if there are fewer.
        multi_label: whether an image may have several labels.
        image_shape: [H, W, C], as the network is given them in training; None leaves its outputs unchecked.
    """

    num_examples: int
    class_counts: np.ndarray = field(repr=False)
    images: Callable[[int], np.ndarray]
    multi_label: bool = False
    image_shape: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, source: Source, data: DataConfig) -> "TrainingData":
        """Of a source, by a config."""
        images = functools.partial(sample_images, source, data)
        return cls(len(source), class_counts(source), images, is_multi_label(source), source.image_shape(data))

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)


def recipe_of(
    file: RecipeFile,
    config: Config,
    data: TrainingData,
    topology: Topology,
    learning_rate: optax.Schedule | None = None,
) -> Recipe:
    """The recipe of a config, the file's with what was overridden and settled, and of the hooks of its file.

    Args:
        learning_rate: what the optimizer follows in place of the config's schedule.

    Raises:
        InputError: a name that is unknown, a number out of range, or a hook that returns something else; names it.
    """
    hooks, steps = file.hooks, _steps_of(config, data.num_examples)
    learning_rate = learning_rate or make_schedule(config, steps)
    optimizer = _optimizer(hooks.get("get_optimizer"), at_batch_size(config), learning_rate)
    (loss, eval_loss), metrics = losses_of(file, config, data), metrics_of(file, config, data)
    model = model_of(file, config, data.num_classes)
    # One that is built in has as many outputs as it is told.
    if "get_model" in hooks and data.image_shape is not None:
        with about(hooks["get_model"].name):
            check_outputs(model, data.image_shape, data.num_classes, "the data")
    return Recipe(
        config=config,
        model=model,
        optimizer=optimizer,
        loss=loss,
        eval_loss=eval_loss,
        objective=_objective(hooks.get("get_objective"), config, topology),
        metrics=metrics,
        augmentation=_function(hooks.get("get_augmentation"), "(key, image)", config),
        parts=parts_of(file, config, data.num_examples),
        initialize=_initialize(hooks.get("get_initialize"), config, data.images),
        learning_rate=learning_rate,
    )


def losses_of(file: RecipeFile, config: Config, data: TrainingData) -> tuple[ExampleLoss, ExampleLoss]:
    """The loss of training, and that of evaluation, by hook or by name. Raises: InputError; as `recipe_of`."""
    hooks = file.hooks
    if "get_loss" in hooks:
        given, where = hooks["get_loss"](config), hooks["get_loss"].name
        if config.loss.class_weights is not None:
            raise InputError(
                f"loss.class_weights={config.loss.class_weights}: {where} gives a loss, which has its own weights; "
                "leave it out"
            )
        with about(where):
            loss = example_loss(given, data.num_classes, multi_label=data.multi_label)
        return loss, loss
    return configured_losses(config, data.class_counts, multi_label=data.multi_label)


def metrics_of(file: RecipeFile, config: Config, data: TrainingData) -> Mapping[str, Metric | SetMetric]:
    """What is measured beside the loss, by name and by hook. Raises: InputError; as `recipe_of`."""
    metrics = configured_metrics(config, data.num_classes, multi_label=data.multi_label)
    if "get_metrics" not in file.hooks:
        return metrics
    hook = file.hooks["get_metrics"]
    return with_given(metrics, hook(config), hook.name, data.num_classes, multi_label=data.multi_label)


def parts_of(file: RecipeFile, config: Config, num_examples: int) -> tuple[Part, ...]:
    """The parts of the step, by name and by hook. Raises: InputError; as `recipe_of`."""
    steps, hook = _steps_of(config, num_examples), file.hooks.get("get_parts")
    configured = configured_parts(config, steps.total)
    return configured if hook is None else check_parts(hook(config, steps), hook.name, configured)


def model_of(file: RecipeFile, config: Config, num_classes: int) -> Model:
    """The network of a recipe, by its hook or by name. Raises: InputError."""
    hook = file.hooks.get("get_model")
    if hook is None:
        return adapt(MODELS.get(config.model.name)(config, num_classes))
    network = hook(config, num_classes)
    with about(hook.name):
        return adapt(network)


def check_optimizer(optimizer: Any, where: str, config: Config) -> optax.GradientTransformation:
    """Anything with optax's two functions. Raises: InputError; `where` says who gave it.

    Or the config says something of layers that an object decides itself.
    """
    functions = (getattr(optimizer, name, None) for name in ("init", "update"))
    if isinstance(optimizer, type) or not all(map(callable, functions)):
        raise InputError(f"{where}: {kind_of(optimizer)} was given; give an optax optimizer, such as optax.sgd(0.1)")
    check_called(optimizer.init, where, "init", "params")
    check_called(optimizer.update, where, "update", "updates, state, params", more=True)
    for layer, decay in config.optimizer.own.decays.items():
        raise InputError(
            f"optimizer.groups: {layer}:decay={decay:g}: {where} gives an object, which has its own decay; leave it out"
        )
    return optimizer


def check_parts(parts: Any, where: str, configured: tuple[Part, ...] = ()) -> tuple[Part, ...]:
    """Parts of the step, each with a name of its own, with those of the config among them: the guard leaves the arrays
    of what comes before it as they were, and what judges, such as a `LossScale`, has to change its own. The averaged
    gradient is clipped before others change it.

    Raises: InputError; `where` says who gave them.
    """
    given = list(parts) if isinstance(parts, list | tuple) else [parts]
    if wrong := [part for part in given if not isinstance(part, Part)]:
        raise InputError(f"{where}: {kind_of(wrong[0])} was given; give a list of jaxddp.engine.parts.part.Part")
    names = [part.name for part in (*given, *configured)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{where}: two parts are called {twice[0]!r}; give each another name")
    quiet, judging = ([part for part in given if part.judges is judges] for judges in (False, True))
    first, others = ([part for part in configured if isinstance(part, GradientNorm) is norm] for norm in (True, False))
    return (*first, *quiet, *others, *judging)


def check_listeners(listeners: Any, where: str) -> list[Any]:
    """Objects with any of a listener's methods. Raises: InputError; `where` says who gave them."""
    if not isinstance(listeners, Sequence) or isinstance(listeners, str):
        raise InputError(f"{where}: {kind_of(listeners)} was given; give a list of listeners")
    for listener in listeners:
        if isinstance(listener, type) or not any(callable(getattr(listener, moment, None)) for moment in MOMENTS):
            raise InputError(f"{where}: {kind_of(listener)} has none of a listener's methods ({', '.join(MOMENTS)})")
        for moment, given in MOMENTS.items():
            if (method := getattr(listener, moment, _absent)) is not _absent:
                _check_method(method, where, f"{type(listener).__name__}.{moment}", given)
        checked(getattr(listener, "wants_predictions", 0), ShownImages, f"{where}: wants_predictions")
    return list(listeners)


def _check_method(method: Any, where: str, name: str, arguments: str) -> None:
    if not callable(method):
        raise InputError(f"{where}: {name} is {kind_of(method)}; define a method {name}(self, {arguments})")
    check_called(method, where, name, arguments)


def _function(hook: Hook | None, of: str, *arguments: Any) -> Any:
    """What a hook returns, a function `of` these arguments; None where there is no hook."""
    if hook is None:
        return None
    found: Any = hook(*arguments)
    if not callable(found):
        raise InputError(f"{hook.name}: {kind_of(found)} was given; give a function of {of}")
    return found


def _optimizer(hook: Hook | None, config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    if hook is None:
        return OPTIMIZERS.get(config.optimizer.name)(config, learning_rate)
    # One that the config does not name has no numbers of its own there; epsilon was always its affair.
    usual = asdict(config.optimizer.numbers()) | {"epsilon": config.optimizer.epsilon}
    config = config.replace(optimizer=usual)
    return check_optimizer(hook(config, learning_rate), hook.name, config)


def _objective(hook: Hook | None, config: Config, topology: Topology) -> Callable[[Objective], TrainObjective]:
    if hook is None:
        return OBJECTIVES.get(config.objective.name)(config, topology)
    # It is called when the step is made.
    return one_line(hook.path, f"{hook.function.__name__}: ")(_function(hook, "(objective)", config, topology))


def _initialize(hook: Hook | None, config: Config, images: Callable[[int], np.ndarray]) -> Transform | None:
    found = _function(hook, "(params, model_state)", config, images)
    # It runs later, when the network is initialized.
    return None if hook is None else one_line(hook.path, f"{hook.function.__name__}: ")(found)


def _steps_of(config: Config, num_examples: int) -> Steps:
    plan = Plan.of(config, num_examples)
    return Steps(plan.total_steps, config.optimizer.warmup.steps(**plan.sizes))
