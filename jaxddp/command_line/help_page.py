"""What `--help` shows of a command that takes a config: short forms of its keys, and a page before one is named."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from jaxddp.choices import keys_of_choices, resolved, unread
from jaxddp.command_line.short_forms import options_of, typed
from jaxddp.keys import SHORT
from jaxddp.overrides import flatten, is_tree
from jaxddp.recipe_file import config_names

STYLE = (tyro.conf.PositionalMetavarFromFieldName,)
"""Words without a name are called as their fields are: RUN, IMAGES."""
_VALUES = {"data": "DIR", "model": "NAME", "epochs": "N", "batch_size": "B", "lr": "X"}
"""What follows a short form."""
_COMPLETION = (
    "Completion: --tyro-write-completion bash FILE, first behind CONFIG, writes a script; also for zsh and fish."
)
_OWN_PAGE = "Every key of CONFIG is an option, too: --help behind CONFIG lists them with its values."


def described(command: type) -> str:
    """What a command is for, and the short forms of its keys."""
    text = inspect.getdoc(command) or ""
    if not SHORT.values() & options_of(command).keys():
        return text
    short = (f"{typed(key)} {value} for {typed(SHORT[key])}" for key, value in _VALUES.items())
    return f"{text}\n\nShort forms: {', '.join(short)}.\n\n{_COMPLETION}"


def page_of(command: type, *, optional: bool = False) -> tuple[Any, Any]:
    """A command whose field `config` is a recipe's as it is shown before one is named, and its defaults: with the word
    CONFIG, and without the keys.

    Args:
        optional: whether the command does without a config, too.
    """
    places: dict[str, Any] = {each.name: Path("runs/CONFIG") for each in fields(command) if each.default is MISSING}
    short = [(key, _short(key, value), field(default="", kw_only=True)) for key, value in _VALUES.items()]
    page = make_dataclass(
        command.__name__,
        [("config", _word(optional)), *short],
        bases=(command,),
        namespace={"__doc__": f"{inspect.getdoc(command)}\n\n{_OWN_PAGE}"},
        frozen=True,
    )
    return page, page(**places | {"config": "" if optional else tyro.MISSING})


def page_of_config(command: Any, hooks: Collection[str]) -> tuple[Any, Any]:
    """A command with a recipe's config, and its defaults, as its page shows them: without the keys that the config's
    choices do not read, and with their own values where it leaves them these.

    Args:
        hooks: of the recipe file, which stand for what they bring.
    """
    config = command.config
    values = resolved(flatten(config.to_dict()), hooks)
    shown = _shown(config, {key: values[key] for key in keys_of_choices()}, unread(config, hooks))
    whole: Any = Annotated[type(shown), tyro.conf.arg(name="")]
    page = _derived(type(command), [("config", whole, MISSING)])
    return page, page(**{each.name: getattr(command, each.name) for each in fields(command)} | {"config": shown})


def _shown(section: Any, values: Mapping[str, Any], hidden: Collection[str], prefix: str = "") -> Any:
    """A section, or a whole config, of a type without the hidden keys, and with these values."""
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
    kept = {each.name: getattr(section, each.name) for each in fields(section)}
    return _derived(type(section), changed)(**kept | {name: value for name, _, value in changed})


def _derived(kind: type, changed: Iterable[tuple[str, Any, Any]]) -> Any:
    """A dataclass as another with other fields of the same names."""
    own = [(name, hint, field(default=value)) for name, hint, value in changed]
    return make_dataclass(kind.__name__, own, bases=(kind,), namespace={"__doc__": kind.__doc__}, frozen=True)


def _short(key: str, value: str) -> Any:
    shown = tyro.conf.arg(help=f"Short for {typed(SHORT[key])}.", metavar=value, help_behavior_hint="")
    return Annotated[str, shown]


def _word(optional: bool) -> Any:
    names = ", ".join(config_names())
    told = f"A name ({names}), the path of a Python file with get_config(), or a run's work directory."
    hint = "(may be left out)" if optional else None
    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=told, help_behavior_hint=hint)]
