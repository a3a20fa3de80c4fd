"""Check that the hooks of a recipe read the keys that are set for the choices that they replace."""

import contextlib

import jax

from jaxddp.config.choices import CHOICES
from jaxddp.config.registry import OBJECTIVES, OPTIMIZERS, SCHEDULES
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError, Key, Words, joined
from jaxddp.models.variables import trees_of
from jaxddp.recipe.file import RecipeFile
from jaxddp.recipe.hooks import CALLED
from jaxddp.recipe.sources import is_built_in
from jaxddp.setup.layout import Layout
from jaxddp.setup.recipe import Recipe


def check_keys_of_hooks(file: RecipeFile, recipe: Recipe, layout: Layout) -> None:
    """Check that each key that is set for a replaced choice has an effect.

    These keys are the name of the choice, the settings of all choices of the kind, and the other keys that the choices
    read. For objectives it is the name alone, because an objective may read other keys while the step is traced. A key
    has an effect if a hook, or a function that a hook returned, reads it, or another part of the run.

    Raises:
        InputError: a key of `file.set_keys` has no effect. The message names all such keys, and the hooks.
    """
    values = flatten(recipe.config.to_dict())
    set_keys = {key for key in file.set_keys if values[key] is not None}
    kinds = [kind for kind in CHOICES if kind.hook in file.hooks]
    if not set_keys or not kinds or not _traced_optimizer(file, recipe, layout):
        return
    read = set[str]().union(*(hook.read for hook in file.hooks.values())) | _read_by_others(file, recipe)
    problems: dict[str, Words] = {}
    names = set[str]()
    for kind in kinds:
        hook = file.hooks[kind.hook]
        name = f"{kind.hook} of {hook.path.stem if is_built_in(hook.path) else hook.path}"
        keys = {kind.key} if kind is OBJECTIVES else {kind.key, *kind.readers(), *kind.also_read}
        unread = keys & set_keys - read
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
        params, _ = trees_of(recipe.model, layout.training_data.image_shape)
        jax.eval_shape(recipe.optimizer.update, params, jax.eval_shape(recipe.optimizer.init, params), params)
        return True
    return False


def _read_by_others(file: RecipeFile, recipe: Recipe) -> set[str]:
    """Return the keys of a schedule that have an effect beside a hook: on its arguments, or on a part of the step."""
    of_hook = file.hooks[OPTIMIZERS.hook].read if OPTIMIZERS.hook in file.hooks else ()
    name = recipe.config.optimizer.schedule
    of_schedule = {SCHEDULES.key, *SCHEDULES.keys_read(name)}
    read = of_schedule if any(part.name == name for part in recipe.parts) else set[str]()
    if CALLED in of_hook:
        read |= {*of_schedule, *SCHEDULES.also_read}
    if "optimizer.learning_rate" in of_hook:
        # The hook receives the learning rate for the batch size.
        read |= {"optimizer.reference_batch", "optimizer.scaling"}
    return read
