"""What a config chooses by name, and which keys of its section each choice reads.

A choice has a dataclass of settings beside its code, which names these keys and has its own defaults; see
`jaxddp.registry`. In a config a key that only some choices read is None until a file or a command says it. One that is
said and not read is an error. What was inherited gives way: where a file or a command names a choice, the keys that it
does not read, and that are not said with it, are None again.
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
from jaxddp.sections.fallback_values import USUAL

Settings = TypeVar("Settings")


CHOICES = (MODELS, LOSSES, OBJECTIVES, OPTIMIZERS, SCHEDULES)
"""The registries whose entries may have settings."""
NAMES = tuple(registry.key for registry in CHOICES)
"""The keys that name a choice."""
DECIDING = frozenset((*NAMES, *(need.key for need in NEEDS.values())))
"""The keys that decide whether others are read."""


def keys_of_choices() -> set[str]:
    """The keys that only some choices read, by dots."""
    return {key for registry in CHOICES for key in registry.readers()}


def settings_of(section: Any, own: Callable[..., Settings]) -> Settings:
    """What a section of a config says to a choice: its settings, with its own defaults where nothing is said."""
    given = {field.name: getattr(section, field.name) for field in dataclasses.fields(own)}  # pyright: ignore
    return own(**{key: value for key, value in given.items() if value is not None})


def given_way(config: Any, said: Collection[str], hooks: Collection[str] = ()) -> Any:
    """A config in which inherited keys give way to the keys that were set.

    Where a set key, such as `optimizer.name` or `train.ema`, leaves others without effect, these have their defaults
    again, unless they were set with it.

    Args:
        said: the keys that one file, one call or one command sets, "optimizer.name".
        hooks: of the recipe file, which stand for what they bring.
    """
    return _given_way(config, said, said, hooks)


def of_release(config: Any, hooks: Collection[str] = ()) -> Any:
    """The config of a run of any release, without the keys that nothing reads: older releases wrote them, too."""
    return _given_way(config, DECIDING, (), hooks)


def _given_way(config: Any, deciding: Collection[str], kept: Collection[str], hooks: Collection[str]) -> Any:
    named = [registry for registry in CHOICES if registry.key in deciding and registry.hook not in hooks]
    gone = {key for registry in named for key in registry.unread(attrgetter(registry.key)(config))} - {*kept}
    config = _with(config, {key: None for key in gone if attrgetter(key)(config) is not None})
    idle = [key for key in without_effect(config, hooks) if key not in kept and NEEDS[key].key in deciding]
    return _with(config, {key: attrgetter(key)(type(config)()) for key in idle})


def unread(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """The keys that the choices of a config do not read, and by whom each is."""
    found: dict[str, Words] = {}
    for registry in CHOICES:
        name = attrgetter(registry.key)(config)
        for key, readers in registry.unread(name).items() if registry.hook not in hooks else ():
            found[key] = (" is read by ", Key(registry.key), f"={', '.join(readers)}, and not by {name}")
    return found


def without_effect(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """The keys of a config that are set and have no effect for want of another key, and why each has none."""
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
    """See that every key that is set has an effect: its choice reads it, and a key that it needs has a value.

    Args:
        hooks: of the recipe file, which stand for what they bring.
        mend: what to do about these keys.

    Raises:
        InputError: names all keys that have no effect, with their values and the keys that decide it.
    """
    values = {key: (attrgetter(key)(config), why) for key, why in unread(config, hooks).items()}
    said = {key: (Key(key, value), why) for key, (value, why) in values.items() if value is not None}
    idle = {key: why for key, why in without_effect(config, hooks).items() if key not in said}
    said |= {key: (Key(key, plain(attrgetter(key)(config))), why) for key, why in idle.items()}
    if said:
        raise InputError(*joined("; ", said.values()), advice=mend([*said]))


def resolved(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a config, by dotted keys, with the values of the choices where it leaves them these.

    What a choice does not read is None. The choices are imported.
    """
    found = dict(settings)
    for registry in CHOICES:
        if registry.key not in found:
            continue
        name, readers = found[registry.key], registry.readers()
        if registry.hook in hooks or name not in registry.keys_read():
            own = USUAL
        else:
            own = _defaults(registry, name)
            found |= dict.fromkeys(readers.keys() - own.keys())
        found |= {key: plain(own.get(key)) for key in readers if found.get(key) is None}
    return found


def compared(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """As `resolved`, and without the keys that need another one and have no effect without it."""
    found = resolved(settings, hooks)
    idle = {key for key, need in NEEDS.items() if need.key in found and not need.is_met(found[need.key])}
    return {key: value for key, value in found.items() if key not in idle}


def _defaults(registry: Registry, name: str) -> dict[str, Any]:
    """The defaults of a choice's settings, by dotted keys."""
    own, section = registry.settings(name), registry.key.partition(".")[0]
    return {} if own is None else {f"{section}.{field.name}": field.default for field in dataclasses.fields(own)}


def with_usual(config: Any) -> Any:
    """The config as hooks are given it: one that stands for a choice has no defaults of its own there."""
    return _with(config, {key: value for key, value in USUAL.items() if attrgetter(key)(config) is None})


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """With other values, by dotted keys, of its sections."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        changed = _with(part, {name: value}) if "." in name else dataclasses.replace(part, **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
