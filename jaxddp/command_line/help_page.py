"""Contents of `--help` for commands that take a config, with and without a config on the command line."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from jaxddp.choices import keys_of_choices, resolved, unread_keys
from jaxddp.command_line.short_forms import format_option, options_of
from jaxddp.keys import SHORT
from jaxddp.overrides import flatten, is_tree
from jaxddp.recipe_files.find_recipe import config_names

STYLE = (tyro.conf.PositionalMetavarFromFieldName,)
"""Positional arguments have the names of their fields: RUN, IMAGES."""
_VALUES = {"data": "DIR", "model": "NAME", "epochs": "N", "batch_size": "B", "lr": "X"}
"""The short forms and the names of their values."""
_COMPLETION = (
    "Completion: --tyro-write-completion bash FILE, directly after CONFIG, writes a script; zsh and fish work, too."
)
_NOTE_ON_KEYS = "Every key of CONFIG is an option, too: --help after CONFIG lists them with its values."


def described(command: type) -> str:
    """Return a command's description, with the short forms of its keys."""
    text = inspect.getdoc(command) or ""
    if not SHORT.values() & options_of(command).keys():
        return text
    short = (f"{format_option(key)} {value} for {format_option(SHORT[key])}" for key, value in _VALUES.items())
    return f"{text}\n\nShort forms: {', '.join(short)}.\n\n{_COMPLETION}"


def page_of(command: type, *, optional: bool = False) -> tuple[Any, Any]:
    """Return a command's dataclass and defaults for `--help` without a config.

    The page contains the word CONFIG instead of the keys.

    Args:
        optional: whether the command also runs without a config.
    """
    paths: dict[str, Any] = {entry.name: Path("runs/CONFIG") for entry in fields(command) if entry.default is MISSING}
    short = [(key, _short(key, value), field(default="", kw_only=True)) for key, value in _VALUES.items()]
    page = make_dataclass(
        command.__name__,
        [("config", _word(optional)), *short],
        bases=(command,),
        namespace={"__doc__": f"{inspect.getdoc(command)}\n\n{_NOTE_ON_KEYS}"},
        frozen=True,
    )
    return page, page(**paths | {"config": "" if optional else tyro.MISSING})


def page_of_config(command: Any, hooks: Collection[str]) -> tuple[Any, Any]:
    """Return a command's dataclass and defaults for `--help` after a config.

    The page omits unused keys. If a key is None in the config, the page shows the default of the choice that reads
    it, such as an optimizer.

    Args:
        hooks: the hooks of the recipe file, each of which replaces a choice.
    """
    config = command.config
    values = resolved(flatten(config.to_dict()), hooks)
    shown = _shown(config, {key: values[key] for key in keys_of_choices()}, unread_keys(config, hooks))
    whole: Any = Annotated[type(shown), tyro.conf.arg(name="")]
    page = _derived(type(command), [("config", whole, MISSING)])
    return page, page(**{entry.name: getattr(command, entry.name) for entry in fields(command)} | {"config": shown})


def _shown(section: Any, values: Mapping[str, Any], hidden: Collection[str], prefix: str = "") -> Any:
    """Return a copy of a section or a config, without the hidden keys and with other values for some keys."""
    changed = []
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        key, value = prefix + name, getattr(section, name)
        if key in hidden:
            changed.append((name, tyro.conf.Suppress[hint], value))
        elif key in values:
            value = values[key]
            changed.append((name, hint, tuple(value) if isinstance(value, list) else value))
        elif is_tree(hint):
            part = _shown(value, values, hidden, f"{key}.")
            changed.append((name, type(part), part))
    original = {entry.name: getattr(section, entry.name) for entry in fields(section)}
    return _derived(type(section), changed)(**original | {name: value for name, _, value in changed})


def _derived(kind: type, changed: Iterable[tuple[str, Any, Any]]) -> Any:
    """Return a subclass of a dataclass with other types and defaults for some fields."""
    redefined = [(name, hint, field(default=value)) for name, hint, value in changed]
    return make_dataclass(kind.__name__, redefined, bases=(kind,), namespace={"__doc__": kind.__doc__}, frozen=True)


def _short(key: str, value: str) -> Any:
    shown = tyro.conf.arg(help=f"Short for {format_option(SHORT[key])}.", metavar=value, help_behavior_hint="")
    return Annotated[str, shown]


def _word(optional: bool) -> Any:
    names = ", ".join(config_names())
    description = f"A name ({names}), the path of a Python file with get_config(), or the work directory of a run."
    hint = "(optional)" if optional else None
    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=description, help_behavior_hint=hint)]
