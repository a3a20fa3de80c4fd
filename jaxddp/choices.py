"""Choices by name, such as an optimizer, and the keys of a config that only some choices read.

The module of a choice defines a dataclass of settings, which lists the keys that the choice reads and their defaults;
see `jaxddp.registry`. In a config, such a key is None until a file or a command sets it. A key that is set and has no
effect is an error. Inherited keys are reset instead: if a file or a command names a choice, the keys that this choice
does not read become None again, unless the same file or command sets them.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from jaxddp.core.errors import InputError, Key, Words, joined
from jaxddp.overrides import flatten, observed_like, plain, unobserved
from jaxddp.registry import LOSSES, MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES, Registry
from jaxddp.sections.dependent_keys import NEEDS

Settings = TypeVar("Settings")


CHOICES = (MODELS, LOSSES, OBJECTIVES, OPTIMIZERS, SCHEDULES)
"""The registries whose entries can have settings."""
NAMES = tuple(registry.key for registry in CHOICES)
"""The keys that name a choice."""
DECIDING_KEYS = frozenset((*NAMES, *(need.key for need in NEEDS.values())))
"""The keys on whose values the effect of other keys depends."""


def replaced_hooks(hooks: Collection[str], keys: Collection[str]) -> set[str]:
    """Return the names of the hooks that lose their effect because a later layer sets `keys`, such as `model.name`."""
    # A schedule replaces no hook: `get_optimizer` receives it.
    return {kind.hook for kind in CHOICES if kind.key in keys and kind is not SCHEDULES} & {*hooks}


def settings_of_choices(keys: Collection[str]) -> set[str]:
    """Return the settings of the choices that `keys` name, such as `optimizer.power` for `optimizer.schedule`."""
    return {setting for kind in CHOICES if kind.key in keys for setting in kind.readers()}


def keys_of_choices() -> set[str]:
    """Return the keys that only some choices read, such as "optimizer.beta2"."""
    return {key for registry in CHOICES for key in registry.readers()}


def settings_of(section: Any, settings_class: Callable[..., Settings]) -> Settings:
    """Return the settings of a choice: the values of its section, with its defaults for keys that are None."""
    unnoted = unobserved(section)
    values = {field.name: getattr(unnoted, field.name) for field in dataclasses.fields(settings_class)}  # pyright: ignore
    return observed_like(section, settings_class(**{key: value for key, value in values.items() if value is not None}))


def reset_unread(config: Any, set_keys: Collection[str], hooks: Collection[str] = ()) -> Any:
    """Reset the inherited keys that lose their effect because a key such as `optimizer.name` was set.

    Args:
        set_keys: the keys that one file, call or command sets. They are not reset.
        hooks: names of the recipe's hooks, each of which replaces a choice.
    """
    return _reset(config, set_keys, set_keys, hooks)


def without_unread(config: Any, hooks: Collection[str] = ()) -> Any:
    """Return a run's config without the keys that have no effect. Older releases stored such keys."""
    return _reset(config, DECIDING_KEYS, (), hooks)


def _reset(config: Any, deciding: Collection[str], kept: Collection[str], hooks: Collection[str]) -> Any:
    """Reset the keys without effect that depend on the keys `deciding`, except the keys `kept`."""
    kinds = [kind for kind in CHOICES if kind.key in deciding and kind.hook not in hooks]
    unread = {key for kind in kinds for key in kind.unread_keys(attrgetter(kind.key)(config))} - {*kept}
    config = _with(config, {key: None for key in unread if attrgetter(key)(config) is not None})
    ineffective = [key for key in without_effect(config, hooks) if key not in kept and NEEDS[key].key in deciding]
    return _with(config, {key: attrgetter(key)(type(config)()) for key in ineffective})


def unread_keys(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """Return the keys that the choices of a config do not read, each with the text that follows it in a message."""
    reasons: dict[str, Words] = {}
    for registry in CHOICES:
        name = attrgetter(registry.key)(config)
        for key, readers in registry.unread_keys(name).items() if registry.hook not in hooks else ():
            reasons[key] = (" is read by ", Key(registry.key), f"={', '.join(readers)}, and not by {name}")
    return reasons


def without_effect(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """Return the keys that are set without the key that they need, each with the text that follows it in a message.

    Such a key has no effect, because the needed key does not have one of the needed values.
    """
    default = type(config)()
    of_hooks = {key for registry in CHOICES if registry.hook in hooks for key in registry.readers()}
    reasons: dict[str, Words] = {}
    for key, need in NEEDS.items():
        value, unset = attrgetter(key)(config), attrgetter(key)(default)
        if key not in of_hooks and value != unset and (unset is not None or value):
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
    values = {key: (attrgetter(key)(config), why) for key, why in unread_keys(config, hooks).items()}
    problems = {key: (Key(key, value), why) for key, (value, why) in values.items() if value is not None}
    ineffective = {key: why for key, why in without_effect(config, hooks).items() if key not in problems}
    problems |= {key: (Key(key, plain(attrgetter(key)(config))), why) for key, why in ineffective.items()}
    if problems:
        raise InputError(*joined("; ", problems.values()), advice=advise([*problems]))


def resolved(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a config with the defaults of its choices in place of None.

    Keys that a choice does not read are None. The modules of the choices are imported.

    Args:
        settings: the settings of a config by dotted keys, as `flatten` returns them.
        hooks: names of the recipe's hooks, each of which replaces a choice and may read all of its keys.
    """
    values = dict(settings)
    for registry in CHOICES:
        if registry.key not in values:
            continue
        name, readers = values[registry.key], registry.readers()
        defaults = _defaults(registry, name) if name in registry.keys_read() else {}
        if registry.hook not in hooks and name in registry.keys_read():
            values |= dict.fromkeys(readers.keys() - defaults.keys())
        values |= {key: plain(defaults.get(key)) for key in readers if values.get(key) is None}
    return values


def effective_settings(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Return the result of `resolved` without the keys that have no effect because they need another key."""
    values = resolved(settings, hooks)
    ineffective = {key for key, need in NEEDS.items() if need.key in values and not need.is_met(values[need.key])}
    return {key: value for key, value in values.items() if key not in ineffective}


def _defaults(registry: Registry, name: str) -> dict[str, Any]:
    """Return the defaults of a choice's settings, by dotted keys."""
    settings, section = registry.settings(name), registry.key.partition(".")[0]
    return (
        {} if settings is None else {f"{section}.{field.name}": field.default for field in dataclasses.fields(settings)}
    )


def with_defaults(config: Any) -> Any:
    """Return a config with the defaults of the choices that it names in place of None, as hooks receive it."""
    defaults: dict[str, Any] = {}
    for registry in CHOICES:
        name = attrgetter(registry.key)(config)
        defaults |= _defaults(registry, name) if name in registry.keys_read() else {}
    return _with(config, {key: value for key, value in defaults.items() if attrgetter(key)(config) is None})


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a config with other values, by dotted keys."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        changed = _with(part, {name: value}) if "." in name else dataclasses.replace(part, **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
