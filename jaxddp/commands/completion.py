"""`jaxddp completion bash|zsh`: print the script with which a shell completes the words of a command."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import tyro

from jaxddp.command_line.completion_script import SHELLS, CompletedCommand, completion_script
from jaxddp.command_line.parse import parse
from jaxddp.command_line.short_forms import options_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.wording import choices
from jaxddp.overrides import keys_of


@dataclass(frozen=True)
class Completion:
    """Print the script with which a shell completes commands, configs, runs, keys and values.

    Example: jaxddp completion bash > ~/.local/share/bash-completion/completions/jaxddp
    """

    shell: tyro.conf.Positional[str] = tyro.MISSING
    """bash or zsh."""


def run(arguments: list[str], usage: str, command: Callable[[str], Callable[[list[str]], int]]) -> int:
    """Run the command, and return the exit code.

    Args:
        usage: the usage of all commands, whose lines name subcommands and positional arguments.
        command: returns the function of a command, whose module contains the dataclasses of its options.

    Raises: InputError.
    """
    shell = parse(Completion, Completion(), "jaxddp completion", arguments).shell
    if shell not in SHELLS:
        raise InputError(f"completion: {shell!r}: {choices(shell, SHELLS)}")
    print(completion_script(shell, list(_commands(usage, command))), end="")
    return 0


def _commands(usage: str, command: Callable[[str], Callable[[list[str]], int]]) -> Iterator[CompletedCommand]:
    lines = re.findall(r"^(?:usage:)? +jaxddp ([a-z-]+) ?(\S*)", usage, re.MULTILINE)
    for name in dict.fromkeys(name for name, _ in lines):
        following = [word for line_name, words in lines if line_name == name for word in words.split("|")]
        module = sys.modules[getattr(command(name), "func", command(name)).__module__]
        kinds = [kind for kind in vars(module).values() if is_dataclass(kind) and isinstance(kind, type)]
        options = dict[str, Any]()
        for kind in kinds:
            if kind.__module__ == module.__name__ or kind.__name__.lower() == name:
                options |= options_of(kind)
        places = [word.strip("[]").rstrip(".") for word in following if word.isupper() or word.strip("[]").isupper()]
        if places[:1] == ["CONFIG"] and name != "launch":
            # `sweep` takes every key, too, with several values.
            options |= dict(keys_of(Config))
        subcommands = [word for word in following if word.isalpha() and word.islower()]
        yield CompletedCommand(name, options, subcommands, places[0] if places else "")
