"""The objects of a recipe: those that a user provides, and the losses and metrics that a config names.

A user provides objects by hooks of a recipe file, or by arguments of the Python API.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

import jaxddp.engine.objective as objective
from jaxddp.config import Config
from jaxddp.config.registry import LOSSES, METRICS, OPTIMIZERS, Registry
from jaxddp.config.tree import BALANCED, ShownImages
from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, Key, about, counted, kind_of, refused
from jaxddp.core.user_code import check_parameters
from jaxddp.data.source import LabelKind
from jaxddp.engine.objective import ExampleLoss
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.guard import GRADIENT_NORM, LOSS_SCALE, SKIPPED, GradientNorm
from jaxddp.engine.parts.part import Part
from jaxddp.kernels import BY_NAME, Kernels
from jaxddp.models.interface import Model
from jaxddp.recipe.file import Hook
from jaxddp.schedules import Steps, at_batch_size
from jaxddp.setup.resources import ImageShape, TrainingData
from jaxddp.training.events import METHODS
from jaxddp.training.listeners.notifier import OptionalLogger


@dataclass(frozen=True)
class UserObject:
    """An object that a user provides.

    Attributes:
        where: the beginning of messages about the object: "my.py: get_loss", or "loss".
        hook: the hook that returned it; None for an argument.
    """

    value: Any
    where: str
    hook: Hook | None = None

    def named_in_errors(self) -> AbstractContextManager[None]:
        """Begin the errors of the block with the name of the hook. Errors about arguments name the argument already."""
        return nullcontext() if self.hook is None else about(self.where)

    def function(self, description: str, arguments: str) -> Callable[..., Any]:
        """Return the object as a function. An error in the function of a hook names the file and the line.

        Raises: InputError, which describes the arguments, if it is no function or takes other positional arguments.
        """
        if isinstance(self.value, type) or not callable(self.value):
            advice = f"give a function of {description}"
            if self.hook is None:
                raise refused(self.where, self.value, advice)
            raise InputError(f"{self.where}: {kind_of(self.value)} was given", advice=advice)
        check_parameters(self.value, self.where, getattr(self.value, "__name__", type(self.value).__name__), arguments)
        return self.value if self.hook is None else self.hook.guarded(self.value)


_OPTIONAL = frozenset({"augmentation", "initialize", "metrics"})
"""The arguments that may be None, for no object."""
ObjectSource = Callable[..., UserObject | None]
"""(kind, such as "loss", and the arguments of its hook) -> the user's object of that kind, or None."""


def objects_of_hooks(hooks: Mapping[str, Hook]) -> ObjectSource:
    """Return the source of the objects that hooks return. A hook is called when its object is requested."""

    def user_object(kind: str, *arguments: Any) -> UserObject | None:
        hook = hooks.get(f"get_{kind}")
        return None if hook is None else UserObject(hook(*arguments), f"{hook.path}: get_{kind}", hook)

    return user_object


def objects_of_arguments(**objects: Any) -> ObjectSource:
    """Return the source of the objects that are arguments of a call, by name."""
    provided = {kind: value for kind, value in objects.items() if value is not None or kind not in _OPTIONAL}
    return lambda kind, *_: UserObject(provided[kind], kind) if kind in provided else None


def check_listeners(listeners: Any, where: str) -> list[Any]:
    """Check that each object has a listener's method, and return the objects. Raises: InputError."""
    if not isinstance(listeners, Sequence) or isinstance(listeners, str):
        raise InputError(f"{where}: {kind_of(listeners)} was given; give a list of listeners")
    for listener in listeners:
        if isinstance(listener, type) or not any(callable(getattr(listener, moment, None)) for moment in METHODS):
            raise InputError(f"{where}: {kind_of(listener)} has none of a listener's methods ({', '.join(METHODS)})")
        for moment, arguments in METHODS.items():
            name, method = f"{type(listener).__name__}.{moment}", getattr(listener, moment, None)
            if hasattr(listener, moment) and not callable(method):
                raise InputError(f"{where}: {name} is {kind_of(method)}; define a method {name}(self, {arguments})")
            if method is not None:
                check_parameters(method, where, name, arguments)
        checked(getattr(listener, "wants_predictions", 0), ShownImages, f"{where}: wants_predictions")
    return list(listeners)


_KEY = "loss.class_weights"


def class_weights(config: Config, class_counts: np.ndarray, num_examples: int) -> np.ndarray | None:
    """Return the class weights, float64[K], or None. Balanced weights are N / (K n_k) for n_k of N examples in class k.

    With several labels for each example, the sum of the n_k is above N. With shares, n_k is their sum. Raises:
    InputError if there are not K weights, or weights are balanced and a class has no examples.
    """
    weights = config.loss.weights
    if weights is None:
        return None
    if weights == BALANCED:
        if len(missing := np.flatnonzero(class_counts == 0)):
            problem = f": class {missing[0]} of {len(class_counts)} has no training images"
            advice = "give the weights, or leave it out with ", Key("data.classes")
            raise InputError(Key.plain(_KEY, BALANCED), problem, advice=advice)
        return num_examples / (len(class_counts) * class_counts)
    if len(weights) != len(class_counts):
        problem = f": {counted(len(weights), 'weight')} for {counted(len(class_counts), 'class')}"
        raise InputError(Key(_KEY), problem, advice="give one for each, in order")
    return np.array(weights)


def _make_loss(config: Config, weights: np.ndarray | None, labels: LabelKind) -> ExampleLoss:
    make: Any = LOSSES.get(config.loss.name)
    name, smoothing = Key.plain("loss.name", config.loss.name), config.train.label_smoothing
    # `bce` would move each share towards one half, as if the image could have several labels.
    if smoothing and (labels.form == "numbers" or (labels.form, config.loss.name) == ("shares", "bce")):
        problem = f": the labels are {labels.form}"
        raise InputError(Key("train.label_smoothing", smoothing), problem, advice="set it to 0")
    if weights is not None:
        if "class_weights" not in inspect.signature(make).parameters:
            raise InputError(Key(_KEY), ": ", name, " takes no weights", advice="leave them out")
        make = functools.partial(make, class_weights=tuple(weights.tolist()))
    loss, advice = make(config), ("set ", Key("loss.name"), f" to {_that_take(LOSSES, labels, config)}")
    objective.check_form(loss, name, labels, advice)
    return objective.example_loss(loss, labels)


def _that_take(registry: Registry, labels: LabelKind, *arguments: Any) -> str:
    """Return the names of the losses or metrics that take some labels."""
    made = {name: registry.get(name)(*arguments) if arguments else registry.get(name) for name in registry.names()}
    return " or ".join(name for name, each in made.items() if labels.form in getattr(each, "takes", ()))


_RESERVED = {"loss", "step", "epoch", "split", "count", "seconds", "learning_rate", "images_per_second"}
_RESERVED |= {"data_wait_fraction", "flops_utilization", "peak_memory", "image_size", "substituted"}
_RESERVED |= {GRADIENT_NORM, LOSS_SCALE, SKIPPED}
"""Names that metrics.jsonl uses for other values. Names that begin with `epoch_` are reserved, too."""
_NAME = re.compile(r"(?!epoch_)[\w.-]+")


def check_requested_metrics(listeners: Iterable[Any], labels: LabelKind) -> None:
    """Raise `InputError` if a listener requests a metric that does not fit the labels of the data."""
    for listener in listeners:
        is_logger = isinstance(listener, OptionalLogger)
        where = (Key("log.to"), f": {listener.name}") if is_logger else type(listener).__name__
        for name in getattr(listener, "wants_metrics", ()):
            objective.check_form(METRICS.get(name), (where, f": its metric: {name}"), labels, "leave it out")


def check_name(name: Any, where: str) -> None:
    """Raise `InputError` if a name is not allowed for a metric. `where` names the hook or the argument."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise InputError(f"{where}: {name!r} cannot be the name of a metric; give another")


def losses_of(config: Config, data: TrainingData, user_object: ObjectSource) -> tuple[ExampleLoss, ExampleLoss]:
    """Make the loss of training and the loss of evaluation, which has no label smoothing.

    Raises: InputError if the name is unknown, the class weights do not fit the loss or the classes, or the user's
    object is no loss.
    """
    custom = user_object("loss", config)
    if custom is None:
        weights = class_weights(config, data.class_counts, data.num_examples)
        plain = config.replace(train={"label_smoothing": 0.0})
        training = _make_loss(config, weights, data.labels)
        return training, training if config == plain else _make_loss(plain, weights, data.labels)
    if config.loss.class_weights is not None and not (custom.hook is not None and _KEY in custom.hook.read):
        key = Key.plain(_KEY, config.loss.class_weights)
        raise InputError(key, f": {custom.where} gives a loss, which has its own weights", advice="leave it out")
    with custom.named_in_errors():
        loss = objective.example_loss(custom.value, data.labels)
    return loss, loss


def optimizer_of(
    config: Config, rate: optax.Schedule, model: Model, image_shape: ImageShape, user_object: ObjectSource
) -> tuple[optax.GradientTransformation, Kernels, bool]:
    """Return the optimizer, the kernels for it, and whether it uses the learning rate schedule `rate`.

    Raises: InputError if the user's object is no optax optimizer, or the config sets weight decays of layers beside it.
    """
    arguments = at_batch_size(config), rate
    custom = user_object("optimizer", *arguments)
    # The kernels of built-in networks are known without a trace, by their names. A user's optimizer needs none.
    is_traced = not type(getattr(model, "module", None)).__module__.startswith("jaxddp.models.")
    is_traced &= custom is None or config.model.lora is not None
    arrays = getattr(model, "layer_arrays", None) if is_traced else None
    kernels = BY_NAME if arrays is None else Kernels.of_layers(arrays(image_shape))
    if custom is None:
        return OPTIMIZERS.get(config.optimizer.name)(*arguments, kernels), kernels, True
    optimizer, where = custom.value, custom.where
    functions = (getattr(optimizer, name, None) for name in ("init", "update"))
    if isinstance(optimizer, type) or not all(map(callable, functions)):
        raise InputError(f"{where}: {kind_of(optimizer)} was given; give an optax optimizer, such as optax.sgd(0.1)")
    check_parameters(optimizer.init, where, "init", "params")
    check_parameters(optimizer.update, where, "update", "updates, state, params", more=True)
    for layer, decay in config.optimizer.layer_settings.decays.items():
        problem = f": {layer}:decay={decay:g}: {where} gives an object, which has its own decay"
        raise InputError(Key("optimizer.groups"), problem, advice="leave it out")
    return optimizer, kernels, custom.hook is not None


def metrics_of(config: Config, labels: LabelKind, user_object: ObjectSource) -> dict[str, Any]:
    """Make the metrics in addition to the loss, by name: the config's and the user's.

    The config's metrics that need more classes than the data have are left out. A metric of the user replaces the
    config's metric of the same name. Raises: InputError if a metric does not fit the labels, the user's object is no
    dict of functions like those of `METRICS`, or two metrics return a value of the same name.
    """
    metrics = {name: METRICS.get(name) for name in config.eval.metrics}
    advice = f"name {_that_take(METRICS, labels)}"
    for name, metric in metrics.items():
        objective.check_form(metric, (Key("eval.metrics"), f": {name}"), labels, advice)
    metrics = {name: each for name, each in metrics.items() if labels.num_classes >= getattr(each, "min_classes", 1)}
    custom = user_object("metrics", config)
    if custom is None:
        return metrics
    given, where = custom.value, custom.where
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: {kind_of(given)} was given; give a dict of name to function")
    if not given:
        return metrics
    metrics, measured_by = metrics | dict(given), dict[str, str]()
    for name, metric in metrics.items():
        check_name(name, where)
        if objective.is_set_metric(metric):
            values = objective.check_set_metric(metric, f"{where}: {name}", labels)
        else:
            objective.check_metric(metric, f"{where}: {name}", labels)
            values = (name,)
        for value in values:
            check_name(value, f"{where}: {name}")
            if (other := measured_by.setdefault(value, name)) != name:
                raise InputError(f"{where}: {other} and {name} both measure {value!r}; rename one of them")
    return metrics


def parts_of(config: Config, steps: Steps, user_object: ObjectSource) -> tuple[Part, ...]:
    """Make the parts of the step, the config's and the user's, in the order in which they run.

    Gradient clipping comes first. Parts that decide whether a step is skipped, such as `LossScale`, come last, because
    the guard of a skipped step restores the arrays of the parts that run before it. Raises: InputError if an object is
    no part, or two parts have the same name.
    """
    configured, custom = configured_parts(config, steps), user_object("parts", config, steps)
    if custom is None:
        return configured
    parts = list(custom.value) if isinstance(custom.value, list | tuple) else [custom.value]
    if wrong := [part for part in parts if not isinstance(part, Part)]:
        raise InputError(f"{custom.where}: {kind_of(wrong[0])} was given; give a list of jaxddp.engine.parts.part.Part")
    names = [part.name for part in (*parts, *configured)]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{custom.where}: two parts are called {duplicates[0]!r}; give each another name")
    ordinary, judging = [part for part in parts if not part.judges], [part for part in parts if part.judges]
    first, others = ([part for part in configured if isinstance(part, GradientNorm) is norm] for norm in (True, False))
    return (*first, *ordinary, *others, *judging)
