"""Which keys of a config have an effect, by the choices that it names and the values of other keys.

The keys that only some choices of a kind read are None until a file or a command sets them, and then have the default
of the choice; see `jaxddp.config.registry`. Some keys need another key (`Requires`). A key that is set and has no
effect is an error. Inherited keys are reset instead: if a file or a command sets the key that decides on their effect,
the keys that lose it get their defaults back, unless the same file or command sets them.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from jaxddp.config.registry import LOSSES, MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES, Requires
from jaxddp.config.values import flatten, keys_of, notes, plain
from jaxddp.core.errors import InputError, Key, Words, joined

CHOICES = (MODELS, LOSSES, OBJECTIVES, OPTIMIZERS, SCHEDULES)
"""The kinds whose choices can have settings."""
NAMES = tuple(kind.key for kind in CHOICES)
"""The keys that name a choice."""


@functools.cache
def needs(tree: type) -> Mapping[str, Requires]:
    """Return what each key of a config needs, for the keys that need another key."""
    return {key: need for key, hint in keys_of(tree) for need in notes(hint, Requires)}


def replaced_hooks(hooks: Collection[str], keys: Collection[str]) -> set[str]:
    """Return the names of the hooks that lose their effect because a later layer sets `keys`, such as `model.name`."""
    # A schedule replaces no hook: `get_optimizer` receives it.
    return {kind.hook for kind in CHOICES if kind.key in keys and kind is not SCHEDULES} & {*hooks}


def keys_of_choices(names: Collection[str] = NAMES) -> set[str]:
    """Return the keys that only some choices read, such as "optimizer.beta2", of the kinds that these keys name."""
    return {key for kind in CHOICES if kind.key in names for key in kind.readers()}


def reset_unread(config: Any, set_keys: Collection[str], hooks: Collection[str] = ()) -> Any:
    """Reset the inherited keys that lose their effect because a key such as `optimizer.name` was set.

    Args:
        set_keys: the keys that one file, call or command sets. They are not reset.
        hooks: names of the recipe's hooks, each of which replaces a choice.
    """
    kinds = [kind for kind in CHOICES if kind.key in set_keys and kind.hook not in hooks]
    unread = {key for kind in kinds for key in kind.unread_keys(attrgetter(kind.key)(config))}
    config = _with(config, {key: None for key in unread if key not in set_keys})
    of_tree, default = needs(type(config)), type(config)()
    lost = [key for key in without_effect(config, hooks) if key not in set_keys and of_tree[key].key in set_keys]
    return _with(config, {key: attrgetter(key)(default) for key in lost})


def unread_keys(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """Return the keys that the choices of a config do not read, each with the text that follows it in a message."""
    reasons: dict[str, Words] = {}
    for kind in CHOICES:
        name = attrgetter(kind.key)(config)
        for key, readers in kind.unread_keys(name).items() if kind.hook not in hooks else ():
            reasons[key] = (" is read by ", Key(kind.key), f"={', '.join(readers)}, and not by {name}")
    return reasons


def without_effect(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """Return the keys that are set without the key that they need, each with the text that follows it in a message."""
    default, set_by_hooks = type(config)(), keys_of_choices([kind.key for kind in CHOICES if kind.hook in hooks])
    reasons: dict[str, Words] = {}
    for key, need in needs(type(config)).items():
        value, unset = attrgetter(key)(config), attrgetter(key)(default)
        if key not in set_by_hooks and value != unset and (unset is not None or value):
            other = attrgetter(need.key)(config)
            if other is None and need.key in keys_of_choices():
                other = resolved(flatten(config.to_dict()), hooks)[need.key]
            if not need.is_met(other):
                reasons[key] = need.reason_unmet(other)
    return reasons


def _leave_out(keys: Sequence[str]) -> str:
    return f"leave {'it' if len(keys) == 1 else 'them'} out"


def check_read(config: Any, hooks: Collection[str] = (), advise: Callable[[Sequence[str]], str] = _leave_out) -> None:
    """Check that every key that is set has an effect: its choice reads it, and the key that it needs is set.

    Args:
        hooks: names of the recipe's hooks, each of which replaces a choice and may read any key.
        advise: a function that returns the advice of the message for the keys without effect.

    Raises:
        InputError: a key has no effect. The message names it, its value, and the key that decides its effect.
    """
    unread = {key: why for key, why in unread_keys(config, hooks).items() if attrgetter(key)(config) is not None}
    reasons = unread | {key: why for key, why in without_effect(config, hooks).items() if key not in unread}
    values = {key: attrgetter(key)(config) for key in reasons}
    problems = [(Key(key, value if key in unread else plain(value)), reasons[key]) for key, value in values.items()]
    if problems:
        raise InputError(*joined("; ", problems), advice=advise([*reasons]))


def resolved(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a config with the defaults of its choices in place of None.

    Keys that a choice does not read are None.

    Args:
        settings: the settings of a config by dotted keys, as `flatten` returns them.
        hooks: names of the recipe's hooks, each of which replaces a choice and may read all of its keys.
    """
    values = dict(settings)
    for kind in CHOICES:
        if (name := values.get(kind.key)) is None:
            continue
        own, all_read = kind.keys_read(name), kind.hook in hooks or name not in kind.names()
        for key in kind.readers():
            if values.get(key) is None or not (all_read or key in own):
                values[key] = plain(own[key].default) if key in own else None
    return values


def effective_settings(tree: type, settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Return the result of `resolved` without the keys that have no effect because they need another key."""
    values = resolved(settings, hooks)
    lost = {key for key, need in needs(tree).items() if need.key in values and not need.is_met(values[need.key])}
    return {key: value for key, value in values.items() if key not in lost}


def with_defaults(config: Any) -> Any:
    """Return a config with the defaults of the choices that it names in place of None, as hooks receive it."""
    chosen = [kind.keys_read(attrgetter(kind.key)(config)) for kind in CHOICES]
    defaults = {key: field.default for fields in chosen for key, field in fields.items()}
    return _with(config, {key: value for key, value in defaults.items() if attrgetter(key)(config) is None})


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a config with other values, by dotted keys."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        if attrgetter(name)(part) != value:
            changed = _with(part, {name: value}) if "." in name else dataclasses.replace(part, **{name: value})
            config = dataclasses.replace(config, **{section: changed})
    return config
