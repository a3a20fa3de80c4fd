"""What was asked for: a config with the objects that it names, its data and its devices."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import optax

from jaxddp.augment.preprocess import Augmentation, Preprocess, check_augmentation
from jaxddp.config import Config, DataConfig
from jaxddp.config.data_section import UNLABELLED_RATIO
from jaxddp.config.goal import VAL_EMA, Goal
from jaxddp.config.registry import MODELS, OBJECTIVES
from jaxddp.core.errors import InputError, Key, Words, counted, kind_of
from jaxddp.data.batch import Division
from jaxddp.data.formats.array_files import check_grades
from jaxddp.data.order import BalancedOrder, RepeatedOrder, SampleOrder, check_repeats, unlabelled_seed
from jaxddp.data.source import Source, check_labelled, check_one_label, check_pixels, labels_of
from jaxddp.data.united import UnitedSource, own_part
from jaxddp.engine.initial_state import Transform
from jaxddp.engine.objective import ExampleLoss, Objective, TrainObjective, check_set_metric, is_set_metric, supervised
from jaxddp.engine.parts.part import Part
from jaxddp.kernels import BY_NAME, Kernels
from jaxddp.measure.cost import digest
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt, with_cpu_convolutions
from jaxddp.models.interface import Model
from jaxddp.recipe.file import RecipeFile
from jaxddp.schedules import make_schedule
from jaxddp.setup.feed import Feed
from jaxddp.setup.network_checks import check_network, check_sizes, in_precision
from jaxddp.setup.resources import ImageShape, Layout, Resources, TrainingData
from jaxddp.setup.user_objects import ObjectSource, losses_of, metrics_of, optimizer_of, parts_of
from jaxddp.training.evaluation import EarlyStopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What was asked for: a config, the objects that it names, its data and devices. Nothing is compiled yet.

    Attributes:
        config: the config, with all values resolved.
        preprocess: turns the pixels of a batch into the input of the network.
        eval_loss: the loss of evaluation, with class weights and without label smoothing.
        objective: a function that takes the supervised objective, which includes the loss, and returns the function
            that a step minimizes.
        metrics: metrics in addition to the loss, by name.
        augmentation: a function that augments one image after the config's augmentation.
        initialize: a function of the initial (params, model_state) that returns new ones.
        learning_rate: the schedule of the optimizer, for logs; None if it is unknown.
        schedule: a function of the step number, from 0. The optimizer's updates are multiplied by its result.
        file: the recipe file; None for the Python API.
    """

    config: Config = dataclasses.field(repr=False)
    topology: Topology
    resources: Resources
    layout: Layout
    feed: Feed
    preprocess: Preprocess
    model: Model = dataclasses.field(repr=False)
    optimizer: optax.GradientTransformation = dataclasses.field(repr=False)
    loss: ExampleLoss
    eval_loss: ExampleLoss
    objective: Callable[[Objective], TrainObjective] = supervised
    kernels: Kernels = BY_NAME
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    augmentation: Augmentation | None = None
    parts: tuple[Part, ...] = ()
    initialize: Transform | None = None
    learning_rate: optax.Schedule | None = None
    schedule: optax.Schedule | None = None
    file: RecipeFile | None = None

    @classmethod
    def of(
        cls, config: Config, topology: Topology, resources: Resources, layout: Layout, objects: Mapping[str, Any]
    ) -> "Recipe":
        """Make the recipe of `objects`, which are fields, with its feed and its preprocessing.

        Raises: InputError if the network does not accept images of all sizes, the images cannot be kept on the devices,
        a data set is smaller than its batch, augmentation, mean or std do not fit the images, or the objective's own
        check fails.
        """
        data, augmentation = layout.training_data, objects.get("augmentation")
        check_sizes(config.data, objects["model"], data, layout.shapes)
        feed = _feed(config, resources, layout, objects.get("objective", supervised))
        check_normalization(config.data, data.image_shape)
        preprocess = Preprocess.of(config, config.data.augment, augmentation)
        for shape in layout.shapes:
            check_augmentation(preprocess, shape, data.dtype)
        if augmentation is not None:
            dtype = jax.numpy.promote_types(preprocess.dtype, "float32")
            _check_draws(augmentation, jax.ShapeDtypeStruct(data.image_shape, dtype))
        known = {"config": config, "topology": topology, "resources": resources, "layout": layout}
        recipe = cls(**known, feed=feed, preprocess=preprocess, **objects)
        # An objective may have a check of its own; see `jaxddp.config.registry.OBJECTIVES`.
        if (check := method_of(recipe.objective, "check")) is not None:
            objective = Objective(recipe.model, recipe.loss, preprocess, recipe.metrics)
            image = jax.ShapeDtypeStruct(data.image_shape, data.dtype)
            check(objective, image, unlabelled=resources.unlabelled is not None)
        return recipe

    @property
    def goal(self) -> Goal:
        """The metric, the direction and the smoothing by which validations are compared."""
        return self.config.checkpoint.goal(averages=any(part.beside for part in self.parts))

    @property
    def validated(self) -> Source | None:
        """The validation data; None if validation is disabled."""
        return self.resources.val if self.layout.plan.evaluate.examples else None

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other fields. A new config or other devices get a new layout.

        The training data and the augmentation must stay the same. Raises: see `Layout.of`.
        """
        changed = dataclasses.replace(self, **fields)
        if not fields.keys() & {"config", "topology"}:
            return changed
        layout = Layout.of(changed.config, changed.topology, self.layout.training_data)
        return dataclasses.replace(changed, layout=layout, feed=self.feed.divided(layout.way.counts, layout.division))

    def early_stopping(self, *, has_further_metrics: bool = False) -> EarlyStopping:
        """Return the rule that selects the best validation and ends the run: `checkpoint.best`, `train.stop_after`.

        The names of further metrics, which the user's functions return, are not known yet. Raises: InputError if the
        metric of `checkpoint.best` is not measured, or early stopping or a part of the step needs validations.
        """
        config = self.config
        early_stopping = EarlyStopping(self.goal, config.train.stop_after, config.train.stop_min_gain)
        if self.validated is None:
            every = Key("eval.every", config.eval.every, f'"{config.eval.every}"')
            advice: Words = "give val too" if self.resources.val is None else (every, " disables validation")
            if config.train.stop_after is not None:
                key = Key("train.stop_after", config.train.stop_after)
                raise InputError(key, ": nothing is validated", advice=advice)
            if following := [part.name for part in self.parts if part.follows]:
                is_schedule = config.optimizer.schedule == following[0]
                subject = Key("optimizer.schedule", following[0]) if is_schedule else f"the part {following[0]!r}"
                raise InputError(subject, " follows validations, and nothing is validated", advice=advice)
        if not has_further_metrics:
            labels, names = self.layout.training_data.labels, ["loss"]
            for name, metric in self.metrics.items():
                names += check_set_metric(metric, name, labels) if is_set_metric(metric) else [name]
            averages = any(part.beside for part in self.parts)
            early_stopping.check([*names, *(f"{VAL_EMA} {name}" for name in names if averages)])
        return early_stopping


def method_of(objective: Callable[..., Any], name: str) -> Any:
    """Return an optional method of an objective, see `jaxddp.config.registry.OBJECTIVES`, or None."""
    # `unwrap` undoes the wrapper that adds the line of the recipe file to errors.
    return getattr(inspect.unwrap(objective), name, None)


def minimized(make_objective: Callable[[Objective], TrainObjective], supervised: Objective) -> TrainObjective:
    """Return the function that a step minimizes. Raises: InputError if a recipe's objective returned no function."""
    if not callable(objective := make_objective(supervised)):
        advice = "return a function (params, model_state, batch, …)"
        raise InputError(f"objective: it returned {kind_of(objective)}", advice=advice)
    return objective


def make_recipe(config: Config, topology: Topology, resources: Resources, given: ObjectSource, **more: Any) -> Recipe:
    """Make the recipe of a config, its data and devices, and the objects of the user; see `make_objects`."""
    if "kappa" in config.eval.metrics:
        check_grades(labels_of(resources.train))
    layout = Layout.of(config, topology, TrainingData.of(resources.train, config.data))
    return Recipe.of(config, topology, resources, layout, make_objects(config, layout, given, **more))


def make_objects(
    config: Config, layout: Layout, objects: ObjectSource, rate: Any = None, precision: str | None = None
) -> dict[str, Any]:
    """Make the objects of a recipe, as its fields: each is the user's, or the built-in one that the config names.

    Args:
        config: the config, with all values resolved, such as the precision.
        objects: the source of the user's objects.
        rate: a learning rate schedule, an `optax.Schedule`, which replaces the config's.
        precision: the `train.precision` that the user set; None for a default.

    Raises: InputError if a name is unknown, a number is out of range, or an object is of the wrong type. The message
    names the key, the hook or the argument.
    """
    data, topology, steps = layout.training_data, layout.way.topology, layout.plan.schedule_steps(config)
    schedule = rate or make_schedule(config, steps)
    loss, eval_loss = losses_of(config, data, objects)
    check = functools.partial(check_network, config=config, layout=layout, precision=precision)
    model = model_of(config, data.labels.num_classes, objects, data.image_shape, check)
    optimizer, kernels, uses_schedule = optimizer_of(config, schedule, model, data.image_shape, objects)
    if (custom := objects("objective", config, topology)) is None:
        objective = OBJECTIVES.get(config.objective.name)(config, topology)
    else:
        takes = "(objective)" if custom.hook else "the supervised objective, or a name"
        objective = custom.function(takes, "supervised")
    metrics = method_of(objective, "metrics") or functools.partial(metrics_of, config, user_object=objects)
    initialize, augmentation = objects("initialize", config, data.images), objects("augmentation", config)
    made = {"model": model, "kernels": kernels, "optimizer": optimizer, "loss": loss, "eval_loss": eval_loss}
    return made | {
        "objective": objective,
        "metrics": metrics(data.labels),
        "parts": parts_of(config, steps, objects),
        "augmentation": augmentation and augmentation.function("(key, image)", "key, image"),
        "initialize": initialize and initialize.function("(params, model_state)", "params, model_state"),
        "learning_rate": schedule if uses_schedule else None,
    }


def model_of(
    config: Config, num_classes: int, objects: ObjectSource, image_shape: ImageShape | None = None, check: Any = None
) -> Model:
    """Make the network. Raises: InputError.

    A user's network may be cast to `train.precision` (see `in_precision`), but not without an `image_shape`: then it
    only gives names and shapes of arrays. `check` checks it, a function of the network and the beginning of messages.
    """
    custom = objects("model", config, num_classes)
    if custom is None:
        # A built-in network has `num_classes` outputs.
        built_in = adapt(MODELS.get(config.model.name)(config, num_classes))
        return with_cpu_convolutions(built_in, allowed=config.model.cpu_convolutions)
    with custom.named_in_errors():
        model = with_cpu_convolutions(adapt(custom.value), allowed=config.model.cpu_convolutions)
        if image_shape is not None:
            model = in_precision(model, image_shape, config.train.precision)
        if check is not None:
            check(model, custom.where)
    return model


def _feed(config: Config, resources: Resources, layout: Layout, objective: Callable[..., Any]) -> Feed:
    """Return the feed of the training data, with the unlabelled data if the objective may read them."""
    source, unlabelled, topology = resources.train, resources.unlabelled, layout.way.topology
    check_labelled(own_part(source), "training data")

    def feed_of(source: Source, order: SampleOrder) -> Feed:
        if config.data.cache == "device":
            source.check_resident(config.data)
        return Feed(source, order, config.data, topology, source.substitutes(config.data), layout.growth)

    feed = feed_of(source, make_order(source, config, topology, layout.division))
    reads_unlabelled = objective is not supervised and getattr(objective, "reads_unlabelled", True)
    if unlabelled is not None and reads_unlabelled:
        ratio = config.objective.unlabelled_ratio or UNLABELLED_RATIO
        check_pixels(unlabelled, source, config.data, "unlabelled data")
        if (size := config.train.batch_size * ratio) > len(unlabelled):
            problem = f": a step takes {size:,} unlabelled images, and there are {len(unlabelled):,}"
            advice = "lower it, or ", Key("train.batch_size")
            raise InputError(Key("objective.unlabelled_ratio", ratio), problem, advice=advice)
        order = SampleOrder(len(unlabelled), size, unlabelled_seed(config.seed))
        feed = dataclasses.replace(feed, unlabelled=feed_of(unlabelled, order))
    return feed.divided(layout.way.counts, layout.division)


def make_order(source: Source, config: Config, topology: Topology, division: Division | None = None) -> SampleOrder:
    """Return the order of examples.

    Raises: InputError if the batch is larger than the data set, or is not a multiple of `data.repeats`, or classes
    cannot be balanced.
    """
    if isinstance(source, UnitedSource):
        unit = 1 if division is None else division.smallest.batch_size // topology.peers.process_count
        return source.order(config.train.batch_size, config.seed, unit, topology.peers)
    repeats = config.data.repeats
    check_repeats(repeats, config.train.batch_size)
    # The data set must have as many examples as a batch, although a batch with copies has fewer different ones.
    order = SampleOrder(len(source), config.train.batch_size, config.seed)
    order = dataclasses.replace(order, batch_size=config.train.batch_size // repeats)
    if config.data.sampling == "balanced":
        labels = labels_of(source)
        check_one_label(labels, Key.plain("data.sampling", "balanced"))
        order = BalancedOrder.of(labels.values, order.batch_size, config.seed)
    return order if repeats == 1 else RepeatedOrder.of(order, repeats)


def _check_draws(augmentation: Augmentation, image: jax.ShapeDtypeStruct) -> None:
    """Raise `InputError` if an augmentation draws numbers by another generator than `jax.random`."""
    # JAX keeps the trace of a function that it has seen.
    traces = {digest(lambda key, image: augmentation(key, image), jax.random.key(0), image) for _ in range(2)}
    if len(traces) > 1:
        fault = ": two traces differ, as if by numpy.random, and a compiled step repeats one of them"
        raise InputError("augmentation", fault, advice="draw random numbers from the key by jax.random")


def check_normalization(data: DataConfig, image_shape: tuple[int, int, int]) -> None:
    """Raise `InputError` if the numbers of means and standard deviations do not fit images [H, W, C]."""
    if not (len(data.mean) == len(data.std) == 1 or len(data.mean) == len(data.std) >= image_shape[-1]):
        numbers = f" has {counted(len(data.mean), 'value')}, ", Key("data.std"), f" {len(data.std)}"
        channels = f", and images of {image_shape} have {image_shape[-1]} channels"
        raise InputError(Key("data.mean"), *numbers, channels, advice="give a value for each channel, or one for all")
