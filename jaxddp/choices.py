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

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Words, joined
from jaxddp.overrides import flatten, plain
from jaxddp.registry import LOSSES, MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES, Registry
from jaxddp.sections.dependent_keys import NEEDS
from jaxddp.sections.fallback_values import FALLBACK_VALUES

Settings = TypeVar("Settings")


CHOICES = (MODELS, LOSSES, OBJECTIVES, OPTIMIZERS, SCHEDULES)
"""The registries whose entries can have settings."""
NAMES = tuple(registry.key for registry in CHOICES)
"""The keys that name a choice."""
DECIDING = frozenset((*NAMES, *(need.key for need in NEEDS.values())))
"""The keys that decide whether other keys have an effect."""


def keys_of_choices() -> set[str]:
    """The keys that only some choices read, such as "optimizer.beta2"."""
    return {key for registry in CHOICES for key in registry.readers()}


def settings_of(section: Any, own: Callable[..., Settings]) -> Settings:
    """Return the settings of a choice: its section's values, and its own defaults for the keys that are None."""
    given = {field.name: getattr(section, field.name) for field in dataclasses.fields(own)}  # pyright: ignore
    return own(**{key: value for key, value in given.items() if value is not None})


def reset_unread(config: Any, said: Collection[str], hooks: Collection[str] = ()) -> Any:
    """Reset the inherited keys that have no effect because of the keys that were set, such as `optimizer.name`.

    Args:
        said: the keys that one file, call or command sets. These are not reset.
        hooks: names of the recipe's hooks, each of which replaces a choice.
    """
    return _given_way(config, said, said, hooks)


def without_unread(config: Any, hooks: Collection[str] = ()) -> Any:
    """Return a run's config without the keys that have no effect. Older releases stored such keys."""
    return _given_way(config, DECIDING, (), hooks)


def _given_way(config: Any, deciding: Collection[str], kept: Collection[str], hooks: Collection[str]) -> Any:
    named = [registry for registry in CHOICES if registry.key in deciding and registry.hook not in hooks]
    gone = {key for registry in named for key in registry.unread(attrgetter(registry.key)(config))} - {*kept}
    config = _with(config, {key: None for key in gone if attrgetter(key)(config) is not None})
    idle = [key for key in without_effect(config, hooks) if key not in kept and NEEDS[key].key in deciding]
    return _with(config, {key: attrgetter(key)(type(config)()) for key in idle})


def unread(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """Return the keys that the choices of a config do not read, each with the text that follows it in a message."""
    found: dict[str, Words] = {}
    for registry in CHOICES:
        name = attrgetter(registry.key)(config)
        for key, readers in registry.unread(name).items() if registry.hook not in hooks else ():
            found[key] = (" is read by ", Key(registry.key), f"={', '.join(readers)}, and not by {name}")
    return found


def without_effect(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """Return the keys that are set but need another key, each with the text that follows it in a message.

    Such a key has no effect, because the other key does not have a value that it needs.
    """
    default = type(config)()
    of_hooks = {key for registry in CHOICES if registry.hook in hooks for key in registry.readers()}
    found: dict[str, Words] = {}
    for key, need in NEEDS.items():
        value, unset = attrgetter(key)(config), attrgetter(key)(default)
        if key not in of_hooks and value != unset and (unset is not None or value):
            other = attrgetter(need.key)(config)
            if other is None and need.key in keys_of_choices():
                other = resolved(flatten(config.to_dict()), hooks)[need.key]
            if not need.is_met(other):
                found[key] = need.unmet(other)
    return found


def _leave_out(keys: Sequence[str]) -> str:
    return f"leave {'it' if len(keys) == 1 else 'them'} out"


def check_read(config: Any, hooks: Collection[str] = (), mend: Callable[[Sequence[str]], str] = _leave_out) -> None:
    """Check that every key that is set has an effect: its choice reads it, and the key that it needs is set.

    Args:
        hooks: names of the recipe's hooks, each of which replaces a choice and may read any key.
        mend: returns the advice of the message for the keys without effect.

    Raises:
        InputError: a key has no effect. The message names all such keys, their values, and the keys that decide it.
    """
    values = {key: (attrgetter(key)(config), why) for key, why in unread(config, hooks).items()}
    said = {key: (Key(key, value), why) for key, (value, why) in values.items() if value is not None}
    idle = {key: why for key, why in without_effect(config, hooks).items() if key not in said}
    said |= {key: (Key(key, plain(attrgetter(key)(config))), why) for key, why in idle.items()}
    if said:
        raise InputError(*joined("; ", said.values()), advice=mend([*said]))


def resolved(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a config with the defaults of its choices in place of None.

    Keys that a choice does not read are None. The modules of the choices are imported.

    Args:
        settings: the settings of a config by dotted keys, as `flatten` returns them.
        hooks: names of the recipe's hooks, each of which replaces a choice.
    """
    found = dict(settings)
    for registry in CHOICES:
        if registry.key not in found:
            continue
        name, readers = found[registry.key], registry.readers()
        if registry.hook in hooks or name not in registry.keys_read():
            own = FALLBACK_VALUES
        else:
            own = _defaults(registry, name)
            found |= dict.fromkeys(readers.keys() - own.keys())
        found |= {key: plain(own.get(key)) for key in readers if found.get(key) is None}
    return found


def compared(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Like `resolved`, without the keys that have no effect because they need another key."""
    found = resolved(settings, hooks)
    idle = {key for key, need in NEEDS.items() if need.key in found and not need.is_met(found[need.key])}
    return {key: value for key, value in found.items() if key not in idle}


def _defaults(registry: Registry, name: str) -> dict[str, Any]:
    """Return the defaults of a choice's settings, by dotted keys."""
    own, section = registry.settings(name), registry.key.partition(".")[0]
    return {} if own is None else {f"{section}.{field.name}": field.default for field in dataclasses.fields(own)}


def with_fallback_values(config: Any) -> Any:
    """Return the config that hooks receive: a hook has no settings with defaults, so None becomes the usual value."""
    return _with(config, {key: value for key, value in FALLBACK_VALUES.items() if attrgetter(key)(config) is None})


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy with other values, by dotted keys."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        changed = _with(part, {name: value}) if "." in name else dataclasses.replace(part, **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
