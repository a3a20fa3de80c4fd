"""What `--help` shows of a command that takes a config: short forms of its keys, and a page before one is named."""

import inspect
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxddp.commands.spelling import options_of, typed
from jaxddp.keys import SHORT
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


def _short(key: str, value: str) -> Any:
    shown = tyro.conf.arg(help=f"Short for {typed(SHORT[key])}.", metavar=value, help_behavior_hint="")
    return Annotated[str, shown]


def _word(optional: bool) -> Any:
    names = ", ".join(config_names())
    told = f"A name ({names}), the path of a Python file with get_config(), or a run's work directory."
    hint = "(may be left out)" if optional else None
    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=told, help_behavior_hint=hint)]
