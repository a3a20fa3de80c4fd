"""Fine-tuning: applies the keys that set single layers, such as `model.freeze` and `optimizer.rate_factors`."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jaxddp.config import Config
from jaxddp.config.layers import Layers, has_prefix, longest_match
from jaxddp.core.errors import InputError, Key
from jaxddp.engine.optimizer import only_trained, thawing, with_factors
from jaxddp.engine.parts.guard import GradientNorm
from jaxddp.kernels import Kernels
from jaxddp.models.adapt import with_frozen_norms
from jaxddp.models.interface import Model, name_of
from jaxddp.models.variables import PARAMS, parameter_names
from jaxddp.setup.recipe import Recipe
from jaxddp.weights.match import Shapes

_log = logging.getLogger("jaxddp.experiment")


def fine_tuned(recipe: Recipe, shapes: Shapes) -> Recipe:
    """Return the recipe with an optimizer and a model that freeze, unfreeze and scale layers as its config specifies.

    The norm by which gradients are clipped counts the layers that a step trains.

    Weight decay per layer is part of the optimizer; see `jaxddp.kernels`.

    Args:
        shapes: the shapes of the network's arrays, by path.

    Raises:
        InputError: a layer does not exist, no layer is left to train, or two keys contradict each other.
    """
    config, optimizer, plan = recipe.config, recipe.optimizer, recipe.layout.plan
    trained, unfreeze_times = _trained(config, shapes, recipe.kernels), config.model.unfreeze_times
    starts = {layer: duration.steps(**plan.lengths) for layer, duration in unfreeze_times.items()}
    for layer, start in starts.items():
        if start >= plan.total_steps and recipe.topology.peers.is_first:
            problem = f"{layer!r} is trained from step {start} on, but the run ends at step {plan.total_steps}"
            _log.warning(f"model.unfreeze: {problem}")
    factors = {name: longest_match(config.optimizer.layer_rate_factors, name, 1.0) for name in trained}
    if config.optimizer.layer_decay != 1:
        decays = _layer_decays(recipe.model, trained, config.optimizer.layer_decay)
        factors = {name: factors[name] * decays[name] for name in trained}
    if config.frozen:
        optimizer = only_trained(optimizer, config.frozen)
    if any(value != 1 for value in factors.values()):
        optimizer = with_factors(optimizer, factors)
    first_steps = {name: int(longest_match(starts, name, 0)) for name in trained}
    if any(starts.values()):
        optimizer = thawing(optimizer, first_steps)
    steps = {name: step if factors[name] else None for name, step in first_steps.items()}
    untrained = tuple((name, step) for name, step in steps.items() if step != 0)
    parts = [replace(part, first_steps=untrained) if isinstance(part, GradientNorm) else part for part in recipe.parts]
    model = with_frozen_norms(recipe.model, config.frozen_norms)
    return replace(recipe, optimizer=optimizer, model=model, parts=tuple(parts))


def _trained(config: Config, shapes: Shapes, kernels: Kernels) -> list[str]:
    """Return the names of the trained parameters. Raises: see `fine_tuned`."""
    names, groups = parameter_names(shapes), config.optimizer.layer_settings
    if not names:
        raise InputError("model: the network has no parameters, so nothing can be trained; give it a layer with some")
    keys = {
        "model.unfreeze": config.model.unfreeze_times,
        "optimizer.rate_factors": config.optimizer.factors,
        "optimizer.groups": groups.rates | groups.decays,
    }
    config.model.frozen.check(names, "model.freeze")
    config.model.fresh_layers.check(names, "model.new_layers")
    Layers((*groups.frozen, *keys["optimizer.groups"])).check(names, "optimizer.groups")
    for key in ("model.unfreeze", "optimizer.rate_factors"):
        Layers(tuple(keys[key])).check(names, key)
    trained = [name for name in names if name not in config.frozen]
    freezing_key = Key.plain("model.freeze", config.model.freeze) if config.model.freeze else Key("optimizer.groups")
    if not trained:
        raise InputError(freezing_key, ": no layer is left to train", advice="leave one out")
    for key, layers in keys.items():
        for layer in layers:
            if not any(has_prefix(layer, name) for name in trained):
                by_model = any(has_prefix(layer, name) and name in config.model.frozen for name in names)
                by = freezing_key if by_model else Key("optimizer.groups")
                raise InputError(Key(key), f": {layer!r} is frozen by ", by)
    for layer, decay in groups.decays.items():
        layer_names = [name for name in trained if has_prefix(layer, name)]
        if not any(kernels.get(name, shapes[PARAMS + name]) for name in layer_names):
            problem = f": {layer}:decay={decay:g}: batch norm and biases are never decayed"
            raise InputError(Key("optimizer.groups"), problem, advice="leave it out")
    return trained


def _layer_decays(model: Model, names: Iterable[str], decay: float) -> dict[str, float]:
    """Return, for each name, `decay` raised to the number of layers that follow it."""
    module: Any = getattr(model, "module", model)
    if not hasattr(module, "depth_of"):
        problem = f": {name_of(module)} does not define the depth of its layers"
        advice = "give it depth and depth_of(path), or leave this out and set ", Key("optimizer.rate_factors")
        raise InputError(Key("optimizer.layer_decay", decay), problem, advice=advice)
    return {name: decay ** (module.depth - 1 - module.depth_of(PARAMS + name)) for name in names}
