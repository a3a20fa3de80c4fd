"""The recipe of a training whose pieces are objects: what `prepare_training` is given, each seen to be of its kind."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxddp.config import Config
from jaxddp.data.labels import is_multi_label
from jaxddp.data.source import Source, check_source
from jaxddp.engine.loss import example_loss
from jaxddp.engine.objective import Objective, TrainObjective
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.errors import InputError
from jaxddp.experiment.argument_kinds import check_function
from jaxddp.experiment.chosen_metrics import configured_metrics, with_given
from jaxddp.experiment.outputs import check_outputs
from jaxddp.experiment.recipe import Recipe, check_optimizer, check_parts
from jaxddp.losses.bce import sigmoid_cross_entropy
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.registry import OBJECTIVES
from jaxddp.training.plan import Plan
from jaxddp.wording import refusal


def recipe_of_objects(config: Config, table: Source, topology: Topology, given: Mapping[str, Any]) -> Recipe:
    """The recipe of the arguments that are objects, by their names: model, optimizer, objective, augmentation,
    initialize, metrics and parts.

    The loss is the usual one of such labels, until `train` is given another. Raises: InputError; names an argument.
    """
    functions = {"augmentation": "key, image", "initialize": "params, model_state"}
    classes, several = table.num_classes, is_multi_label(table)
    usual = sigmoid_cross_entropy if several else softmax_cross_entropy
    loss = example_loss(usual, classes, multi_label=several)
    named = config.replace(eval={"metrics": ("map",)}) if several else config
    metrics = configured_metrics(named, classes, multi_label=several)
    steps = Plan.of(config, len(table)).total_steps
    recipe = Recipe(
        config=config,
        model=adapt(given["model"]),
        optimizer=check_optimizer(given["optimizer"], "optimizer", config),
        loss=loss,
        eval_loss=loss,
        objective=_objective(given["objective"], config, topology),
        metrics=with_given(metrics, given["metrics"] or {}, "metrics", classes, multi_label=several),
        parts=check_parts(given["parts"], "parts", configured_parts(config, steps)),
        **{name: check_function(given[name], name, f"({of})", of) for name, of in functions.items()},
    )
    check_outputs(recipe.model, table.image_shape(config.data), classes, "table")
    return recipe


def check_unlabelled(source: Any) -> Source | None:
    """The argument `unlabelled`, whose labels are not looked at, or None. Raises: InputError; it is something else."""
    if source is None:
        return None
    if not hasattr(check_source(source, "unlabelled"), "without_labels"):
        raise InputError(refusal("unlabelled", source, "it has no without_labels; see jaxddp.data.source.Source"))
    return source.without_labels()


def _objective(objective: Any, config: Config, topology: Topology) -> Callable[[Objective], TrainObjective]:
    """The argument `objective`: a function of the supervised objective, or what a name stands for. Raises: InputError;
    it is something else."""
    if isinstance(objective, str):
        return OBJECTIVES.get(objective)(config, topology)
    if check_function(objective, "objective", "the supervised objective, or a name", "supervised") is None:
        raise InputError("objective=None: give a function of the supervised objective, or a name")
    return objective
