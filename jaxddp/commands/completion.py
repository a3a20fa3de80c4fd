"""`jaxddp completion bash|zsh`: print the script with which a shell completes the words of a command.

The script contains all words, so that completing a word starts no program.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tyro

import jaxddp.cli as cli
from jaxddp.command_line.parse import parse
from jaxddp.command_line.words import format_option, is_flag, options_of
from jaxddp.config import Config
from jaxddp.config.registry import AUGMENTATIONS, CHOICES, LOGGERS, METRICS
from jaxddp.config.values import SHORT, bare, keys_of
from jaxddp.recipe.sources import config_names

_FILES, _FOLDERS, _RUNS = "@files", "@folders", "@runs"
"""Words of the function `_jaxddp_candidates` that stand for files, folders, and work directories of runs."""
_OF_PLACE = {"CONFIG": (*config_names(), _RUNS, _FILES), "RUN": (_RUNS, _FOLDERS), "DIR": (_FOLDERS,)}
"""The words that complete a positional argument, by its name in the usage. Others are files."""


@dataclass(frozen=True)
class Completion:
    """Print the script with which a shell completes commands, configs, runs, keys and values.

    Example: jaxddp completion bash > ~/.local/share/bash-completion/completions/jaxddp
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh"]] = tyro.MISSING
    """bash or zsh."""


class CompletedCommand(NamedTuple):
    """The words of a command.

    Attributes:
        options: the types of its options, by key.
        subcommands: the words that may follow its name, such as check and pack after data.
        place: the name of its first positional argument in the usage, such as CONFIG.
    """

    name: str
    options: Mapping[str, Any]
    subcommands: Sequence[str]
    place: str


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    shell = parse(Completion, Completion(), "jaxddp completion", arguments).shell
    commands = list(_commands())
    options = {key: hint for command in commands for key, hint in command.options.items()}
    flags = [key for key, hint in options.items() if is_flag(hint) and "." not in key]
    of_data = re.findall(r"^ +jaxddp (data [a-z]+) (\S+)", cli.__doc__ or "", re.MULTILINE)
    places = [(command.name, command.subcommands or _words_of(command.place)) for command in commands]
    places += [(f"'{words}'", _words_of(place)) for words, place in of_data]
    parts = {
        "COMMANDS": _printed([command.name for command in commands]),
        "OPTIONS": _cases((command.name, [*map(format_option, command.options), "--help"]) for command in commands),
        "VALUES": _cases(_values_of_options(commands).items()),
        "FLAGS": "|".join(map(format_option, flags)) or "--help",
        "PLACES": _cases(places),
    }
    script, candidates = (Path(__file__).with_suffix(f".{form}").read_text("utf-8") for form in (shell, "sh"))
    # The candidates contain the other parts.
    for name, text in {"CANDIDATES": candidates.strip(), **parts}.items():
        script = script.replace(f"<{name}>", text)
    print(script, end="")


def _commands() -> Iterator[CompletedCommand]:
    """Yield all commands. The usage names their subcommands and positional arguments, and their modules the options."""
    lines = re.findall(r"^(?:usage:)? +jaxddp ([a-z-]+) ?(\S*)", cli.__doc__ or "", re.MULTILINE)
    for name in dict.fromkeys(name for name, _ in lines):
        following = [word for line_name, words in lines if line_name == name for word in words.split("|")]
        module = sys.modules[cli.command_named(name).__module__]
        options = dict[str, Any]()
        for kind in (kind for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)):
            if kind.__module__ == module.__name__ or kind.__name__.lower() == name:
                options |= options_of(kind)
        places = [word.strip("[]").rstrip(".") for word in following if word.strip("[]").isupper()]
        if places[:1] == ["CONFIG"] and name != "launch":
            # `sweep` takes every key, too, with several values.
            options |= dict(keys_of(Config))
        options |= {short: options[key] for short, key in SHORT.items() if key in options and short not in options}
        subcommands = [word for word in following if word.isalpha() and word.islower()]
        yield CompletedCommand(name, options, subcommands, places[0] if places else "")


def _values_of_options(commands: Sequence[CompletedCommand]) -> dict[str, Sequence[str]]:
    """Return the patterns of options with a list of values. An option of several commands may differ between them."""
    return {
        f"{'*' if '.' in key else command.name}' {format_option(key)}'": words
        for command in commands
        for key, hint in command.options.items()
        if (words := _values(SHORT.get(key, key), hint))
    }


def _values(key: str, hint: Any) -> list[str]:
    """Return the values of an option that can be listed: its choices, the names of a registry, true and false."""
    for registry in (*CHOICES, METRICS, AUGMENTATIONS, LOGGERS):
        if registry.key == key:
            return registry.names()
    if is_flag(hint):
        return ["true", "false"]
    kind = bare(hint)
    return [*map(str, get_args(kind))] if get_origin(kind) is Literal else []


def _words_of(place: str) -> Sequence[str]:
    """Return the words that complete a positional argument, which the usage lists or names."""
    return place.split("|") if place.islower() else _OF_PLACE.get(place, (_FILES,))


def _cases(cases: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return the cases of a `case` statement, each of which prints words."""
    return "\n".join(f"    {name}) {_printed(words)} ;;" for name, words in cases)


def _printed(words: Iterable[str]) -> str:
    return " ".join(["printf '%s\\n'", *words])
