"""Check that the hooks of a recipe read the keys that are set for the choices that they replace."""

import contextlib

import jax
import optax

from jaxddp.choices import with_defaults
from jaxddp.core.errors import InputError, Key, Words, joined
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.hooks import CALLED
from jaxddp.models.variables import trees_of
from jaxddp.overrides import flatten, observed
from jaxddp.recipe_file import RecipeFile
from jaxddp.recipe_files.find_recipe import is_built_in
from jaxddp.registry import LOSSES, MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES, Registry
from jaxddp.schedules.peak import at_batch_size
from jaxddp.schedules.warmup import make_schedule
from jaxddp.setup.configured_losses import configured_losses
from jaxddp.setup.layout import Layout
from jaxddp.setup.recipe import Recipe


def check_keys_of_hooks(file: RecipeFile, recipe: Recipe, layout: Layout) -> None:
    """Check that each key that is set for a replaced choice has an effect.

    These keys are the settings of all choices of the kind, and the keys that the choice that the config names would
    read. A key has an effect if a hook, or a function that a hook returned, reads it, or another part of the run.

    Raises:
        InputError: a key of `file.set_keys` has no effect. The message names all such keys, and the hooks.
    """
    values = flatten(recipe.config.to_dict())
    set_keys = {key for key in file.set_keys if values[key] is not None}
    kinds = [kind for kind in (MODELS, LOSSES, OBJECTIVES, OPTIMIZERS, SCHEDULES) if kind.hook in file.hooks]
    if not set_keys or not kinds or not _traced_optimizer(file, recipe, layout):
        return
    read = set[str]().union(*(hook.read for hook in file.hooks.values())) | _read_by_others(recipe, file, layout)
    problems: dict[str, Words] = {}
    names = set[str]()
    for kind in kinds:
        hook = file.hooks[kind.hook]
        name = f"{kind.hook} of {hook.path.stem if is_built_in(hook.path) else hook.path}"
        unread = _keys_of(kind, recipe, layout) & set_keys - read
        problems |= {
            key: (Key(key, values[key]), f" has no effect, because {name} does not read it") for key in sorted(unread)
        }
        if unread and kind is not SCHEDULES:
            names.add(kind.key)
    if problems:
        advice: tuple[Words, ...] = ("leave it out" if len(problems) == 1 else "leave them out",)
        if len(names - problems.keys()) == 1:
            advice += (", or replace the hook by setting ", *map(Key, names))
        raise InputError(*joined("; ", problems.values()), advice=advice)


def _traced_optimizer(file: RecipeFile, recipe: Recipe, layout: Layout) -> bool:
    """Trace the optimizer of a hook, which may read keys in its update. Returns False if it cannot be traced."""
    if OPTIMIZERS.hook not in file.hooks:
        return True
    # The step calls the optimizer in the same way, and reports its errors.
    with contextlib.suppress(Exception):
        _trace(recipe.optimizer, recipe, layout)
        return True
    return False


def _trace(optimizer: optax.GradientTransformation, recipe: Recipe, layout: Layout) -> None:
    """Trace the initial state and an update of an optimizer for the network of a recipe."""
    params, _ = trees_of(recipe.model, layout.training_data.image_shape)
    jax.eval_shape(optimizer.update, params, jax.eval_shape(optimizer.init, params), params)


def _keys_of(kind: Registry, recipe: Recipe, layout: Layout) -> set[str]:
    """Return the keys that choices of a kind read: all settings, and what the choice that the config names reads.

    For objectives it is the name alone, because an objective may read other keys while the step is traced.
    """
    if kind is OBJECTIVES:
        return {kind.key}
    read, data = {kind.key, *kind.readers()}, layout.training_data
    config = observed(with_defaults(recipe.config), read)
    # The name and the values of these keys need not be valid, since a hook replaces the choice.
    with contextlib.suppress(InputError):
        if kind is MODELS:
            MODELS.get(recipe.config.model.name)(config, data.num_classes)
        elif kind is LOSSES:
            configured_losses(config, data.labels, data.class_counts, data.num_examples)
        elif kind is OPTIMIZERS:
            make = OPTIMIZERS.get(recipe.config.optimizer.name)
            _trace(make(at_batch_size(config), lambda step: 0.0), recipe, layout)
        else:
            make_schedule(config, layout.steps)
    section = kind.key.partition(".")[0]
    return {key for key in read if key.partition(".")[0] in (section, "train")}


def _read_by_others(recipe: Recipe, file: RecipeFile, layout: Layout) -> set[str]:
    """Return the keys of choices that have an effect beside the hooks: those of the step and of the schedule."""
    read = {"train.batch_size"}
    config = observed(recipe.config, read)
    # Rates and frozen layers are settings of any optimizer; a decay beside a hook is an error of its own.
    _ = config.optimizer.layer_settings
    parts = configured_parts(config, layout.steps.total)
    if not any(part.name == recipe.config.optimizer.schedule for part in parts):
        read.discard(SCHEDULES.key)
    of_optimizer = file.hooks[OPTIMIZERS.hook].read if OPTIMIZERS.hook in file.hooks else ()
    if CALLED in of_optimizer:
        make_schedule(config, layout.steps)
    if "optimizer.learning_rate" in of_optimizer:
        # The hook receives the learning rate for the batch size.
        at_batch_size(config)
    return read
