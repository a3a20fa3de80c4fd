"""A recipe that treats layers apart: what `model.freeze`, `optimizer.rate_factors` and their like say."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxddp.config import Config
from jaxddp.engine.layerwise import only_trained, thawing, with_factors
from jaxddp.engine.state import PARAMS
from jaxddp.errors import InputError
from jaxddp.experiment.recipe import Recipe
from jaxddp.job.membership import is_first
from jaxddp.layers import Layers, begins
from jaxddp.models.adapt import with_settled_norms
from jaxddp.models.protocol import Model, name_of
from jaxddp.training.plan import Plan

T = TypeVar("T")
_log = logging.getLogger("jaxddp.experiment")


def fine_tuned(recipe: Recipe, names: Sequence[str], plan: Plan) -> Recipe:
    """The recipe with what its config says of layers in its optimizer and its model; `names` are its parameters'.

    Raises:
        InputError: a layer that the network does not have, or none that is left to train.
    """
    config, optimizer = recipe.config, recipe.optimizer
    frozen, thawed, factors = config.model.frozen, config.model.thawed, config.optimizer.factors
    frozen.check(names, "model.freeze")
    config.model.new.check(names, "model.new_layers")
    Layers(tuple(thawed)).check(names, "model.unfreeze")
    Layers(tuple(factors)).check(names, "optimizer.rate_factors")
    trained = [name for name in names if name not in frozen]
    if not trained:
        raise InputError(f"model.freeze={config.model.freeze}: no layer is left to train; leave one out")
    for key, layers in (("model.unfreeze", thawed), ("optimizer.rate_factors", factors)):
        for layer in layers:
            if not any(begins(layer, name) for name in trained):
                raise InputError(f"{key}: {layer!r} is frozen for good by model.freeze={config.model.freeze}")
    sizes = {"num_examples": plan.num_examples, "batch_size": plan.batch_size, "total_steps": plan.total_steps}
    starts = {layer: duration.steps(**sizes) for layer, duration in thawed.items()}
    for layer, start in starts.items():
        if start >= plan.total_steps and is_first():
            _log.warning(f"model.unfreeze: {layer!r} begins at step {start}, and the run ends at {plan.total_steps}")
    by_name = {name: _longest(factors, name, 1.0) for name in trained}
    if config.optimizer.layer_decay != 1:
        decay = _decay(recipe.model, trained, config.optimizer.layer_decay)
        by_name = {name: by_name[name] * decay[name] for name in trained}
    if frozen:
        optimizer = only_trained(optimizer, frozen)
    if any(value != 1 for value in by_name.values()):
        optimizer = with_factors(optimizer, by_name)
    if any(starts.values()):
        optimizer = thawing(optimizer, {name: int(_longest(starts, name, 0)) for name in trained})
    model = with_settled_norms(recipe.model, config.model.settled)
    return dataclasses.replace(recipe, optimizer=optimizer, model=model)


def check_length(before: Config, after: Config) -> None:
    """Raises `InputError` where layers thaw after a share of a run whose length was changed since, or Lookahead ends
    with it."""
    if before.train.duration != after.train.duration:
        if before.train.lookahead is not None:
            raise InputError(
                f"train.lookahead: a run of {before.train.duration} ends on the slow weights, and this one is of "
                f"{after.train.duration}; give prepare_training its length"
            )
        for layer, duration in before.model.thawed.items():
            if duration.unit == "%":
                raise InputError(
                    f"model.unfreeze: {layer}={duration} is of a run of {before.train.duration}, and this one is of "
                    f"{after.train.duration}; give prepare_training its length, or say epochs or steps"
                )


def _longest(values: Mapping[str, T], name: str, default: T) -> T:
    """The value of the longest layer that begins a name."""
    fitting = [layer for layer in values if begins(layer, name)]
    return values[max(fitting, key=len)] if fitting else default


def _decay(model: Model, names: Iterable[str], decay: float) -> dict[str, float]:
    """By name, `decay` to the power of how many layers come after it."""
    module: Any = getattr(model, "module", model)
    if not hasattr(module, "depth_of"):
        raise InputError(
            f"optimizer.layer_decay={decay}: {name_of(module)} does not say how deep its layers lie; give it "
            "depth and depth_of(path), or leave this out and set optimizer.rate_factors"
        )
    return {name: decay ** (module.depth - 1 - module.depth_of(PARAMS + name)) for name in names}
