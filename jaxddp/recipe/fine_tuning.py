"""Fine-tuning: applies the keys about single layers, such as `model.freeze` and `optimizer.rate_factors`."""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.peers import Peers
from jaxddp.engine.layerwise import only_trained, thawing, with_factors
from jaxddp.models.adapt import with_frozen_norms
from jaxddp.models.interface import Model, name_of
from jaxddp.models.variables import PARAMS, parameter_names
from jaxddp.optimizers.decay import is_kernel
from jaxddp.recipe.recipe import Recipe
from jaxddp.sections.layers import Layers, begins, longest
from jaxddp.training.plan import Plan
from jaxddp.weights.match import Shapes

_log = logging.getLogger("jaxddp.experiment")


def fine_tuned(recipe: Recipe, shapes: Shapes, plan: Plan, peers: Peers) -> Recipe:
    """Return the recipe with an optimizer and a model that freeze, unfreeze and scale layers as its config says.

    Weight decay per layer is part of the optimizer; see `jaxddp.optimizers.decay`.

    Args:
        shapes: the shapes of the network's arrays, by path.

    Raises:
        InputError: a layer does not exist, no layer is left to train, or two keys contradict each other.
    """
    config, optimizer = recipe.config, recipe.optimizer
    trained, frozen, thawed = _trained(config, shapes), config.frozen, config.model.thawed
    starts = {layer: duration.steps(**plan.sizes) for layer, duration in thawed.items()}
    for layer, start in starts.items():
        if start >= plan.total_steps and peers.is_first:
            end = f"the run ends at step {plan.total_steps}"
            _log.warning(f"model.unfreeze: {layer!r} is trained from step {start} on, but {end}")
    by_name = {name: longest(config.optimizer.rates, name, 1.0) for name in trained}
    if config.optimizer.layer_decay != 1:
        decay = _decay(recipe.model, trained, config.optimizer.layer_decay)
        by_name = {name: by_name[name] * decay[name] for name in trained}
    if frozen:
        optimizer = only_trained(optimizer, frozen)
    if any(value != 1 for value in by_name.values()):
        optimizer = with_factors(optimizer, by_name)
    if any(starts.values()):
        optimizer = thawing(optimizer, {name: int(longest(starts, name, 0)) for name in trained})
    model = with_frozen_norms(recipe.model, config.settled)
    return dataclasses.replace(recipe, optimizer=optimizer, model=model)


def _trained(config: Config, shapes: Shapes) -> list[str]:
    """Return the names of the trained parameters. Raises: see `fine_tuned`."""
    names, groups = parameter_names(shapes), config.optimizer.own
    if not names:
        raise InputError(
            "model: the network has no parameters, so nothing can be trained; give it a layer with parameters"
        )
    keys = {
        "model.unfreeze": config.model.thawed,
        "optimizer.rate_factors": config.optimizer.factors,
        "optimizer.groups": groups.rates | groups.decays,
    }
    config.model.frozen.check(names, "model.freeze")
    config.model.new.check(names, "model.new_layers")
    Layers(groups.frozen).check(names, "optimizer.groups")
    for key, layers in keys.items():
        Layers(tuple(layers)).check(names, key)
    trained = [name for name in names if name not in config.frozen]
    by = Key.plain("model.freeze", config.model.freeze) if config.model.freeze else Key("optimizer.groups")
    if not trained:
        raise InputError(by, ": no layer is left to train", advice="leave one out")
    for key, layers in keys.items():
        for layer in layers:
            if not any(begins(layer, name) for name in trained):
                frozen = [name for name in names if begins(layer, name) and name in config.model.frozen]
                for_good = f": {layer!r} is frozen by "
                raise InputError(Key(key), for_good, by if frozen else Key("optimizer.groups"))
    for layer, decay in groups.decays.items():
        its = [name for name in trained if begins(layer, name)]
        if not any(is_kernel(name, len(shapes[PARAMS + name])) for name in its):
            raise InputError(
                Key("optimizer.groups"),
                f": {layer}:decay={decay:g}: batch norm and biases are never decayed",
                advice="leave it out",
            )
    return trained


def _decay(model: Model, names: Iterable[str], decay: float) -> dict[str, float]:
    """Return for each name `decay` raised to the number of layers that come after it."""
    module: Any = getattr(model, "module", model)
    if not hasattr(module, "depth_of"):
        raise InputError(
            Key("optimizer.layer_decay", decay),
            f": {name_of(module)} does not define the depth of its layers",
            advice=("give it depth and depth_of(path), or leave this out and set ", Key("optimizer.rate_factors")),
        )
    return {name: decay ** (module.depth - 1 - module.depth_of(PARAMS + name)) for name in names}
