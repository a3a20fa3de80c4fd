"""A command line becomes a dataclass: tyro, with our own readers of words."""

import argparse
import itertools
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from jaxddp.choices import NAMES, check_read, given_way
from jaxddp.command_line.help_page import STYLE, described, page_of, page_of_config
from jaxddp.command_line.short_forms import by_key, is_flag, options_of, spelled_out, typed
from jaxddp.command_line.value_types import rules
from jaxddp.config import Config
from jaxddp.core.errors import Answered, InputError
from jaxddp.core.phases import phase
from jaxddp.job.watchdog import watch_alone
from jaxddp.keys import HELP, near
from jaxddp.overrides import check_values, checked, flatten
from jaxddp.recipe_file import CONFIG_FILE, RecipeFile, TakenSettings, read_recipe, recipe_path
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
                if not told.startswith(_OF_OPTION):
                    raise own from None
                told = f"{told.partition(': ')[0]}: {own}"
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


def parse_recipe(
    command: type[Command], prog: str, arguments: list[str], *, measures: bool = False
) -> tuple[Command, RecipeFile]:
    """As `parse`, of a command whose first word names a recipe file or a run; and that file with the options' config.

    Where the command `measures` a run, the settings are those that the run in its work directory wrote down.
    """
    name, *rest = arguments
    if name in HELP:
        page, shown = page_of(command)
        parse(page, shown, prog, [name])
    make: Any = command
    keys = {field.name for field in fields(make)}
    workdir = workdir_of(recipe_path(name))
    named = Path(option(rest, "--workdir") or workdir) if "workdir" in keys else None
    # What it does meanwhile is bounded as a start is: by the default's limit, since its own is not known yet.
    watch_alone(Config().parallel.stall_timeout)
    with phase("start", f"reading {name}"):
        file = _measured(name, named) if measures and named else read_recipe(name)
    weights = option(rest, "--model.weights") or ("" if file.stored else file.config.model.weights)
    if weights and not measures:
        from jaxddp.workdir.inherited_settings import with_settings_of_run

        file = with_settings_of_run(file, weights, named)
    known = {"config": file.config, "workdir": workdir}
    default = make(**{key: known[key] for key in keys & known.keys()})
    said = by_key(rest, options_of(command))
    if {*HELP} & {*rest}:
        default = replace(default, config=_chosen(file.config, said))
        page, shown = page_of_config(default, file.hooks)
        parse(page, shown, f"{prog} {name}", rest)
    options: Any = parse(command, default, f"{prog} {name}", rest)
    check_names(options.config, file.hooks)
    file = overridden(file, given_way(options.config, {key for key, _ in said}, file.hooks))
    check_read(file.config, file.hooks, lambda keys: _mended(keys, said, f"{prog} {name}", file.path))
    if file.taken.keys:
        from jaxddp.workdir.inherited_settings import with_notice

        file = with_notice(file, str(weights))
    return replace(options, config=file.config), file


def _chosen(config: Config, said: Sequence[tuple[str, list[str]]]) -> Config:
    """The config with the choices that a command line names, for its page."""
    for key, (first, *more) in said:
        if key in NAMES and (name := first.partition("=")[2] or "".join(more[:1])):
            section, _, last = key.partition(".")
            config = config.replace(**{section: {last: name}})
    return config


def _mended(keys: Sequence[str], said: Sequence[tuple[str, list[str]]], begin: str, path: Path) -> str:
    """What to do about keys that nothing reads: the command without them, of a recipe file what to leave out."""
    typed_ones = [key for key, _ in said if key in keys]
    others = [key for key in keys if key not in typed_ones]
    words = [word for key, words in said if key not in keys for word in words]
    told = [f"leave {', '.join(others)} out of {path}"] if others else []
    return "; ".join([*told, f"{shlex.join([*begin.split(), *words])} would do"] if typed_ones else told)


def overridden(file: RecipeFile, config: Config) -> RecipeFile:
    """A recipe file with the config that options made of its own: what they change is no longer taken over."""
    before, data = file.config.data, config.data
    # A place takes the place of a name, and a name that of a place.
    if data.path != before.path and data.name == before.name:
        config = config.replace(data={"name": None})
    elif data.name != before.name and data.path == before.path:
        config = config.replace(data={"path": None})
    one, other = flatten(file.config.to_dict()), flatten(config.to_dict())
    keys = frozenset(key for key in file.taken.keys if one[key] == other[key])
    return replace(file, config=config, taken=replace(file.taken, keys=keys))


def option(words: Sequence[str], name: str) -> str | None:
    """What an option says, read before the settings are known that decide its default; None where it is absent."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(name, nargs="?", dest="value")
    return parser.parse_known_args(words)[0].value


def _measured(name: str, workdir: Path) -> RecipeFile:
    """The run in a work directory where it says all of its settings, else the recipe file of that name."""
    own = workdir / CONFIG_FILE
    if not own.is_file():
        return read_recipe(name)
    run = read_recipe(own)
    if not run.has_network:
        return read_recipe(name)
    known = recipe_path(name).absolute() == own.absolute()
    notice = "" if known else f"{own}: the run's own settings, in place of those of {name}"
    return replace(run, taken=TakenSettings(notice=notice))


def check_run(directory: Path) -> None:
    """Raises `InputError` where there is no such directory."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such work directory; give one that a run wrote into")


def workdir_of(place: str | Path) -> Path:
    """The default work directory of a config's file: that of a `config.json`, else `runs/NAME`."""
    return Path(place).parent if Path(place).name == CONFIG_FILE else Path("runs") / Path(place).stem
