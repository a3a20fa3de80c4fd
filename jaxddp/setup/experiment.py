"""An experiment: a recipe with its data and devices. Contradictions are reported before compilation."""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxddp.augment.mixing import check_mixing
from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.config import Config, DataConfig
from jaxddp.core.errors import InputError, Key, Words, about
from jaxddp.core.wording import counted
from jaxddp.data.batch_plan import Division, Growth
from jaxddp.data.labels import labels_of
from jaxddp.data.order import BalancedOrder, RepeatedOrder, SampleOrder, check_repeats, unlabelled_seed
from jaxddp.data.source import Source, check_labelled
from jaxddp.data.united import UnitedSource, own_part
from jaxddp.engine.objective import Objective, check_set_metric, is_set_metric, supervised
from jaxddp.mesh import Topology
from jaxddp.recipe_file import RecipeFile
from jaxddp.sections.goal import VAL_EMA
from jaxddp.sections.objective_section import UNLABELLED_RATIO
from jaxddp.setup.feed import Feed
from jaxddp.setup.layout import Layout, TrainingData
from jaxddp.setup.network_checks import check_sizes
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.resources import Resources, check_pixels
from jaxddp.training.evaluation import EarlyStopping


@dataclass(frozen=True)
class Experiment:
    """A recipe with its data, devices and layout. Nothing is compiled yet.

    Attributes:
        feed: loads the training data for the devices.
        preprocess: turns the pixels of a batch into the network's input.
        file: the recipe file of the experiment; None for the Python API.
    """

    recipe: Recipe
    resources: Resources
    layout: Layout
    feed: Feed
    preprocess: Preprocess
    file: RecipeFile | None = None

    @property
    def config(self) -> Config:
        """The config of the recipe, with all values resolved."""
        return self.recipe.config

    @property
    def topology(self) -> Topology:
        return self.resources.topology

    def changed(self, *, resources: Resources | None = None, **fields: Any) -> "Experiment":
        """Return a copy with other `fields` of the recipe or other resources. A new config gets a new layout.

        The training data and the augmentation must stay the same. Raises: see `Layout.of`.
        """
        recipe, resources = dataclasses.replace(self.recipe, **fields), resources or self.resources
        layout = self.layout
        if "config" in fields:
            layout = Layout.of(recipe.config, resources.topology, layout.training_data)
        feed = self.feed.divided(layout.gradients.sizes, layout.division)
        return dataclasses.replace(self, recipe=recipe, resources=resources, layout=layout, feed=feed)


def lay_out(recipe: Recipe, resources: Resources, layout: Layout, file: RecipeFile | None = None) -> Experiment:
    """Make an experiment.

    Raises: InputError if the network does not accept images of all sizes; see also `make_feed` and `make_preprocess`.
    """
    check_sizes(recipe.config.data, recipe.model, layout, resources.topology.peers)
    feed = make_feed(recipe, resources, layout.growth, layout.division)
    feed = feed.divided(layout.gradients.sizes, layout.division)
    preprocess = make_preprocess(recipe, resources, layout)
    _check_objective(recipe, resources, layout, preprocess)
    return Experiment(recipe, resources, layout, feed, preprocess, file)


def make_feed(
    recipe: Recipe, resources: Resources, growth: Growth | None = None, division: Division | None = None
) -> Feed:
    """Return the feed of the training data, with the unlabelled data if the objective may read them.

    Args:
        division: the division of a batch, which data of several processes need.

    Raises: InputError if the images cannot be kept on the devices, or a data set is smaller than its batch.
    """
    config, source, topology = recipe.config, resources.train, resources.topology
    check_labelled(own_part(source), "training data")
    feed = _feed_of(source, make_order(source, config, topology, division), config, topology, growth)
    unlabelled, ratio = resources.unlabelled, config.objective.unlabelled_ratio or UNLABELLED_RATIO
    reads_unlabelled = recipe.objective is not supervised and getattr(recipe.objective, "reads_unlabelled", True)
    if unlabelled is None or not reads_unlabelled:
        return feed
    check_pixels(unlabelled, source, config.data, "unlabelled data")
    with about(Key("data.unlabelled"), " with ", Key("objective.unlabelled_ratio", ratio)):
        order = SampleOrder(len(unlabelled), config.train.batch_size * ratio, unlabelled_seed(config.seed))
        return dataclasses.replace(feed, unlabelled=_feed_of(unlabelled, order, config, topology, growth))


def _feed_of(source: Source, order: SampleOrder, config: Config, topology: Topology, growth: Growth | None) -> Feed:
    if config.data.cache == "device":
        source.check_resident(config.data)
    return Feed(source, order, config.data, topology, source.substitutes(config.data), growth)


def make_order(source: Source, config: Config, topology: Topology, division: Division | None = None) -> SampleOrder:
    """Return the order of examples.

    Raises:
        InputError: the batch is larger than the data set, or is not a multiple of `data.repeats`.
    """
    if isinstance(source, UnitedSource):
        unit = 1 if division is None else division.smallest.batch_size // topology.process_count
        return source.order(config.train.batch_size, config.seed, unit, topology.peers)
    repeats = config.data.repeats
    check_repeats(repeats, config.train.batch_size)
    SampleOrder(len(source), config.train.batch_size, config.seed)
    order = _order_of_examples(source, config, config.train.batch_size // repeats)
    return order if repeats == 1 else RepeatedOrder.of(order, repeats)


def _order_of_examples(source: Source, config: Config, batch_size: int) -> SampleOrder:
    """Return the order of the different examples. Raises: InputError if classes cannot be balanced."""
    if config.data.sampling == "balanced":
        labels = labels_of(source)
        if labels.several:
            raise InputError(
                Key.plain("data.sampling", "balanced"), " takes one label per image, but the training data have several"
            )
        return BalancedOrder.of(labels.values, batch_size, config.seed)
    return SampleOrder(len(source), batch_size, config.seed)


def check_normalization(data: DataConfig, image_shape: tuple[int, int, int]) -> None:
    """Raise `InputError` if the numbers of means and standard deviations do not fit images [H, W, C]."""
    if not (len(data.mean) == len(data.std) == 1 or len(data.mean) == len(data.std) >= image_shape[-1]):
        raise InputError(
            Key("data.mean"),
            f" has {counted(len(data.mean), 'value')}, ",
            Key("data.std"),
            f" {len(data.std)}, and images of {image_shape} have {image_shape[-1]} channels",
            advice="give a value for each channel, or one for all",
        )


def make_preprocess(recipe: Recipe, resources: Resources, layout: Layout) -> Preprocess:
    """Return the preprocessing on the devices. Raises: InputError if augmentation, mean or std do not fit."""
    config, data, training_data = recipe.config, recipe.config.data, layout.training_data
    check_normalization(data, training_data.image_shape)
    preprocess = Preprocess.of(config, data.augment, recipe.augmentation)
    for shape in layout.shapes:
        check_augmentation(preprocess, shape, training_data.dtype)
    if not layout.gradients.sizes:
        check_mixing(data.augment, config.train.batch_size, layout.gradients.parts(resources.topology))
    return preprocess


def _check_objective(recipe: Recipe, resources: Resources, layout: Layout, preprocess: Preprocess) -> None:
    """Run the objective's own check of the images, the loss and the unlabelled data. Raises: InputError."""
    training_data = layout.training_data
    if (check := getattr(inspect.unwrap(recipe.objective), "check", None)) is not None:
        image = jax.ShapeDtypeStruct(training_data.image_shape, training_data.dtype)
        objective = Objective(recipe.model, recipe.loss, preprocess, recipe.metrics)
        check(objective, image, unlabelled=resources.unlabelled is not None)


def early_stopping_of(experiment: Experiment, *, has_further_metrics: bool = False) -> EarlyStopping:
    """Return the rule that selects the best validation and ends the run, from `checkpoint.best` and `train.stop_after`.

    Args:
        has_further_metrics: whether the user's functions return further metrics, whose names are not known yet.

    Raises:
        InputError: the metric of `checkpoint.best` is not measured, or validation is disabled although early stopping
            or a part of the training step needs it.
    """
    recipe, config = experiment.recipe, experiment.config
    early_stopping = EarlyStopping(recipe.goal, config.train.stop_after, config.train.stop_min_gain)
    if advice := _validation_advice(experiment):
        if config.train.stop_after is not None:
            raise InputError(Key("train.stop_after", config.train.stop_after), ": nothing is validated", advice=advice)
        for part in recipe.parts:
            if part.follows:
                is_schedule = config.optimizer.schedule == part.name
                subject = Key("optimizer.schedule", part.name) if is_schedule else f"the part {part.name!r}"
                raise InputError(subject, " follows validations, and nothing is validated", advice=advice)
    if not has_further_metrics:
        early_stopping.check(_metric_names(recipe, experiment.layout.training_data))
    return early_stopping


def _metric_names(recipe: Recipe, data: TrainingData) -> Iterator[str]:
    """Yield the names of a validation's metrics, as in the result of `jaxddp.sections.goal.flat`."""
    names = ["loss"]
    for name, metric in recipe.metrics.items():
        is_of_set = is_set_metric(metric)
        names += check_set_metric(metric, name, data.labels) if is_of_set else [name]
    yield from names
    if any(part.beside for part in recipe.parts):
        yield from (f"{VAL_EMA} {name}" for name in names)


def _validation_advice(experiment: Experiment) -> Words:
    """Return the advice of a message that validation is disabled; empty if it is enabled."""
    if experiment.resources.val is None:
        return "give val too"
    if experiment.layout.plan.evaluate.examples:
        return ""
    every = experiment.config.eval.every
    return (Key("eval.every", every, f'"{every}"'), " disables validation")
