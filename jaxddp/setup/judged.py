"""How the validations of a run are judged, and that there are such as it goes by."""

from collections.abc import Iterator

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Words
from jaxddp.engine.set_metrics import check_set_metric, is_set_metric
from jaxddp.goal import VAL_EMA
from jaxddp.recipe.layout import TrainingData
from jaxddp.recipe.recipe import Recipe
from jaxddp.setup.experiment import Experiment
from jaxddp.training.validation.early_stopping import EarlyStopping


def judgement_of(experiment: Experiment, *, measures_more: bool = False) -> EarlyStopping:
    """What a recipe says of `checkpoint.best` and `train.stop_after`, before the first validation.

    Args:
        measures_more: whether functions of the user measure what is not known yet.

    Raises:
        InputError: the metric is none of those that are measured, or something follows validations and there are none.
    """
    recipe, config = experiment.recipe, experiment.config
    judgement = EarlyStopping(config.checkpoint.goal, config.train.stop_after, config.train.stop_min_gain)
    if needs := _needed(experiment):
        if config.train.stop_after is not None:
            raise InputError(Key("train.stop_after", config.train.stop_after), ": nothing is validated", advice=needs)
        for part in recipe.parts:
            if part.follows:
                told = config.optimizer.schedule == part.name
                what = Key("optimizer.schedule", part.name) if told else f"the part {part.name!r}"
                raise InputError(what, " follows validations, and nothing is validated", advice=needs)
    if not measures_more:
        judgement.check(_measured(recipe, experiment.layout.data))
    return judgement


def _measured(recipe: Recipe, data: TrainingData) -> Iterator[str]:
    """The `flat` metrics of a validation."""
    names = ["loss"]
    for name, metric in recipe.metrics.items():
        of_set = is_set_metric(metric)
        names += check_set_metric(metric, name, data.labels) if of_set else [name]
    yield from names
    if any(part.beside for part in recipe.parts):
        yield from (f"{VAL_EMA} {name}" for name in names)


def _needed(experiment: Experiment) -> Words:
    """What to do so that something is validated; empty where it is."""
    if experiment.resources.val is None:
        return "give val too"
    if experiment.layout.plan.evaluate.examples:
        return ""
    every = experiment.config.eval.every
    return (Key("eval.every", every, f'"{every}"'), " switches it off")
