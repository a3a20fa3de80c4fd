"""What a config chooses by name, and which keys of its section each choice reads.

A choice has a dataclass of settings beside its code, which names these keys and has its own defaults; see
`jaxddp.registry`. In a config a key that only some choices read is None until a file or a command says it. One that is
said and not read is an error. What was inherited gives way: where a file or a command names a choice, the keys that it
does not read, and that are not said with it, are None again.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Words, joined
from jaxddp.overrides import plain
from jaxddp.registry import LOSSES, MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES, Registry
from jaxddp.sections.usual import USUAL

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Kind:
    """Choices of one kind. A hook of a recipe file that stands for one may read what it likes."""

    registry: Registry
    hook: str

    @property
    def key(self) -> str:
        """That of the choice's name."""
        return self.registry.key

    def readers(self) -> dict[str, list[str]]:
        """The keys that only some choices read, by dots, and the names of these."""
        found: dict[str, list[str]] = {}
        for name, keys in sorted(self.registry.keys_read().items()):
            for key in sorted(keys):
                found.setdefault(f"{self.key.partition('.')[0]}.{key}", []).append(name)
        return found

    def unread(self, name: Any) -> dict[str, list[str]]:
        """Of these the ones that a choice does not read; of a name that there is not, none."""
        known = name in self.registry.keys_read()
        return {key: names for key, names in self.readers().items() if known and name not in names}


KINDS = (
    Kind(MODELS, "get_model"),
    Kind(LOSSES, "get_loss"),
    Kind(OBJECTIVES, "get_objective"),
    Kind(OPTIMIZERS, "get_optimizer"),
    Kind(SCHEDULES, "get_optimizer"),
)
"""The kinds whose entries have settings."""
NAMES = tuple(kind.key for kind in KINDS)


def keys_of_choices() -> set[str]:
    """The keys that only some choices read, by dots."""
    return {key for kind in KINDS for key in kind.readers()}


def settings_of(section: Any, own: Callable[..., Settings]) -> Settings:
    """What a section of a config says to a choice: its settings, with its own defaults where nothing is said."""
    given = {field.name: getattr(section, field.name) for field in dataclasses.fields(own)}  # pyright: ignore
    return own(**{key: value for key, value in given.items() if value is not None})


def given_way(config: Any, said: Collection[str], hooks: Collection[str] = ()) -> Any:
    """A config in which what was inherited gives way to the choices that are named.

    Args:
        said: the keys that one file, one call or one command says, "optimizer.name".
        hooks: of the recipe file, which stand for what they bring.
    """
    named = [kind for kind in KINDS if kind.key in said and kind.hook not in hooks]
    gone = {key for kind in named for key in kind.unread(attrgetter(kind.key)(config))} - {*said}
    return _with(config, {key: None for key in gone if attrgetter(key)(config) is not None})


def unread(config: Any, hooks: Collection[str] = ()) -> dict[str, Words]:
    """The keys that the choices of a config do not read, and by whom each is."""
    found: dict[str, Words] = {}
    for kind in KINDS:
        name = attrgetter(kind.key)(config)
        for key, readers in kind.unread(name).items() if kind.hook not in hooks else ():
            found[key] = ("read by ", Key(kind.key), f"={', '.join(readers)}, and not by {name}")
    return found


def _leave_out(keys: Sequence[str]) -> str:
    return f"leave {'it' if len(keys) == 1 else 'them'} out"


def check_read(config: Any, hooks: Collection[str] = (), mend: Callable[[Sequence[str]], str] = _leave_out) -> None:
    """See that what is said of a choice is read by it.

    Args:
        hooks: of the recipe file, which stand for what they bring.
        mend: what to do about these keys.

    Raises:
        InputError: names all keys that are not read, with their values and who reads them.
    """
    values = {key: (attrgetter(key)(config), why) for key, why in unread(config, hooks).items()}
    if said := {key: (Key(key, value), " is ", why) for key, (value, why) in values.items() if value is not None}:
        raise InputError(*joined("; ", said.values()), advice=mend([*said]))


def resolved(settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a config, by dotted keys, with the values of the choices where it leaves them these.

    What a choice does not read is None. The choices are imported.
    """
    found = dict(settings)
    for kind in KINDS:
        if kind.key not in found:
            continue
        name, readers = found[kind.key], kind.readers()
        if kind.hook in hooks or name not in kind.registry.keys_read():
            own = USUAL
        else:
            own = _defaults(kind, name)
            found |= dict.fromkeys(readers.keys() - own.keys())
        found |= {key: plain(own.get(key)) for key in readers if found.get(key) is None}
    return found


def _defaults(kind: Kind, name: str) -> dict[str, Any]:
    """Those of a choice, by dotted keys."""
    own, section = kind.registry.settings(name), kind.key.partition(".")[0]
    return {} if own is None else {f"{section}.{field.name}": field.default for field in dataclasses.fields(own)}


def with_usual(config: Any) -> Any:
    """The config as hooks are given it: one that stands for a choice has no defaults of its own there."""
    return _with(config, {key: value for key, value in USUAL.items() if attrgetter(key)(config) is None})


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """With other values, by dotted keys, of its sections."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: dataclasses.replace(getattr(config, name), **own) for name, own in sections.items()}
    return dataclasses.replace(config, **changed) if changed else config
