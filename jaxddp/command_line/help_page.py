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
_VALUES = {"lr": "X", "epochs": "N", "batch_size": "B", "model": "NAME", "data": "DIR", "seed": "N", "offline": ""}
"""The most used options and the names of their values; empty for a flag. They are the first options of a page."""
_SEED = "Seed of all random values."
_NOTE_ON_KEYS = "Every key of CONFIG is an option, too: --help after CONFIG lists them with its values."
_COMPLETION = "jaxddp completion bash, or zsh, prints the script that completes commands, configs, keys and values."


def described(command: type) -> str:
    """Return a command's description."""
    text = inspect.getdoc(command) or ""
    return f"{text}\n\n{_COMPLETION}" if SHORT.values() & options_of(command).keys() else text


def page_of(command: type, *, optional: bool = False) -> tuple[Any, Any]:
    """Return a command's dataclass and defaults for `--help` without a config.

    The page contains the word CONFIG instead of the keys.

    Args:
        optional: whether the command also runs without a config.
    """
    paths: dict[str, Any] = {entry.name: Path("runs/CONFIG") for entry in fields(command) if entry.default is MISSING}
    page = make_dataclass(
        command.__name__,
        [("config", _word(optional))],
        bases=(command, _first_options({})),
        namespace={"__doc__": f"{inspect.getdoc(command)}\n\n{_NOTE_ON_KEYS}\n\n{_COMPLETION}"},
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
    shown = _shown(config, {key: values[key] for key in keys_of_choices()}, {*unread_keys(config, hooks), "seed"})
    whole: Any = Annotated[type(shown), tyro.conf.arg(name="")]
    page = _derived(type(command), [("config", whole, MISSING)], _first_options(values))
    return page, page(**{entry.name: getattr(command, entry.name) for entry in fields(command)} | {"config": shown})


def _first_options(values: Mapping[str, Any]) -> type:
    """Return a dataclass of the most used options. As a base, it puts them before the options of a command.

    Args:
        values: the values of a config by dotted key, which are shown as defaults; empty without a config.
    """
    options = []
    for key, metavar in _VALUES.items():
        description = _SEED if key not in SHORT else f"Short for {format_option(SHORT[key])}."
        value = values.get(SHORT.get(key, key))
        hint = "" if value is None else f"(default: {value})"
        shown = tyro.conf.arg(help=description, metavar=metavar, help_behavior_hint=hint)
        option: Any = Annotated[str, shown] if metavar else Annotated[bool, shown, tyro.conf.FlagCreatePairsOff]
        options.append((key, option, field(default="" if metavar else False, kw_only=True)))
    return make_dataclass("FirstOptions", options, frozen=True)


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


def _derived(kind: type, changed: Iterable[tuple[str, Any, Any]], *bases: type) -> Any:
    """Return a subclass of a dataclass with other types and defaults for some fields, and with further bases."""
    redefined = [(name, hint, field(default=value)) for name, hint, value in changed]
    namespace = {"__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, redefined, bases=(kind, *bases), namespace=namespace, frozen=True)


def _word(optional: bool) -> Any:
    names = ", ".join(config_names())
    file = "the path of a recipe file (Python with get_config(), YAML or JSON)"
    description = f"A name ({names}), {file}, or the work directory of a run. Also as --config CONFIG."
    hint = "(optional)" if optional else None
    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=description, help_behavior_hint=hint)]
