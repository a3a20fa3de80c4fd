"""A command line becomes a dataclass: tyro, with our own readers of words."""

import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

import jaxddp.job.progress as progress
from jaxddp.commands.pages import HELP, STYLE, described, page_of
from jaxddp.commands.spelling import is_flag, options_of, spelled_out, typed
from jaxddp.commands.words import rules
from jaxddp.config import Config
from jaxddp.errors import Answered, InputError
from jaxddp.job.lone_watch import watch_alone
from jaxddp.keys import near
from jaxddp.overrides import check_values, checked
from jaxddp.recipe_file import CONFIG_FILE, RecipeFile, read_recipe
from jaxddp.registry import check_names

Command = TypeVar("Command")
_SIDES, _RULES = "│| ", "─-"
"""Of the frame of a box, on terminals with such characters and without."""
_UNKNOWN, _OF_OPTION = "Unrecognized options: ", "Error parsing --"
_CHOICE = re.compile(r"invalid choice '(.*)' for argument '--([\w.-]+)'")
ConfigOfRecipe = Annotated[Config, tyro.conf.arg(name="")]
"""The field of a command that holds a recipe's config, whose keys are options without a prefix."""


def parse(command: type[Command], default: Command, prog: str, arguments: list[str]) -> Command:
    """The command with its overrides; tyro answers `--help`, and ends the program.

    Raises:
        InputError: an option that is unknown, or a value that is none or out of its range.
    """
    options = options_of(command)
    with redirect_stderr(StringIO()) as said:
        try:
            words = spelled_out(arguments, options)
            style = {"config": STYLE, "description": described(command)}
            parsed = tyro.cli(command, default=default, prog=prog, args=words, registry=rules(), **style)
        except SystemExit as end:
            if not end.code:
                raise Answered(end.code) from None
            told = _told(said.getvalue(), arguments, options)
            # A section that checks itself names its key; a word leaves that to tyro, whose box breaks long lines.
            if (own := _input_error(end)) is not None:
                option, at, _ = told.partition(": ")
                told = f"{option}{at}{own}" if told.startswith(_OF_OPTION) else None
                if told is None:
                    raise own from None
            raise InputError(f"{told}; see {prog} --help") from None
    check_values(parsed, "--")
    return parsed


def _input_error(error: BaseException | None) -> InputError | None:
    """What an error came of, if that is of ours."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


def _told(box: str, arguments: Sequence[str], options: Mapping[str, Any]) -> str:
    """What tyro says of a mistake, in a box of several parts, as one line: the first part, and the options near to one
    that there is not."""
    inside = [line.strip(_SIDES).strip() for line in box.splitlines()[1:-1]]
    # A plain terminal has a rule under the title, too.
    lines = itertools.dropwhile(operator.not_, ("" if {*line} <= {*_RULES} else line for line in inside))
    first = " ".join(itertools.takewhile(bool, lines))
    if (choice := _CHOICE.match(first)) and (key := choice[2].replace("-", "_")) in options:
        checked(choice[1], options[key], f"--{choice[2]}")
    if not first.startswith(_UNKNOWN):
        return first
    unknown = first.removeprefix(_UNKNOWN).split(", ")
    for flag, word in itertools.pairwise(part for each in arguments for part in each.split("=", 1)):
        if word == unknown[0] and is_flag(options.get(flag.removeprefix("--").replace("-", "_"))):
            return f"{flag} {word}: expected True or False"
    names = [word.partition("=")[0].removeprefix("--") for word in unknown if word.startswith("--")]
    meant = dict.fromkeys(typed(key) for name in names for key in near(name, options))
    return f"{first}; perhaps you mean {' or '.join(meant)}" if meant else first


def parse_recipe(command: type[Command], prog: str, arguments: list[str]) -> tuple[Command, RecipeFile]:
    """As `parse`, of a command whose first word names a recipe file; and that file, with its config overridden."""
    name, *rest = arguments
    if name in HELP:
        page, shown = page_of(command)
        parse(page, shown, prog, [name])
    # What it does meanwhile is bounded as a start is: by the default's limit, since its own is not known yet.
    watch_alone(Config().parallel.stall_timeout)
    with progress.phase("start", f"reading {name}"):
        file = read_recipe(name)
    make: Any = command
    known = {"config": file.config, "workdir": workdir_of(name)}
    default = make(**{field.name: known[field.name] for field in fields(make) if field.name in known})
    options: Any = parse(command, default, f"{prog} {name}", rest)
    check_names(options.config, file.hooks)
    return options, replace(file, config=options.config)


def check_run(directory: Path) -> None:
    """Raises `InputError` where there is no such directory."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such work directory; give one that a run wrote into")


def workdir_of(name: str) -> Path:
    """The default work directory of a config: that of a `config.json`, else `runs/NAME`."""
    return Path(name).parent if Path(name).name == CONFIG_FILE else Path("runs") / Path(name).stem
