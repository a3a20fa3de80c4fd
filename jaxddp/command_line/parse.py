"""Parses a command line into a dataclass with tyro and the constructors of `value_types`."""

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
from typing import Annotated, Any, TypeVar, cast

import tyro

from jaxddp.choices import NAMES, check_read, reset_unread
from jaxddp.command_line.config_words import check_one_config
from jaxddp.command_line.help_page import STYLE, described, page_of, page_of_config
from jaxddp.command_line.short_forms import (
    by_key,
    expand_short_forms,
    format_option,
    is_flag,
    options_of,
    value_of_flag,
)
from jaxddp.command_line.value_types import rules
from jaxddp.config import Config
from jaxddp.core.errors import HelpPrinted, InputError
from jaxddp.core.phases import phase
from jaxddp.core.process_exit import watch_alone
from jaxddp.keys import HELP, similar_keys
from jaxddp.overrides import check_values, checked, flatten, keys_of
from jaxddp.recipe_file import RecipeFile, TakenSettings, read_recipe
from jaxddp.recipe_files.find_recipe import CONFIG_FILE, recipe_path
from jaxddp.recipe_files.python_sources import RecipeSources
from jaxddp.registry import check_names

Command = TypeVar("Command")
_SIDES, _RULES = "│| ", "─-"
"""The characters of the frame around tyro's messages: its vertical and horizontal lines. On a terminal without box
characters tyro uses | and -."""
_UNKNOWN, _OF_OPTION = "Unrecognized options: ", "Error parsing --"
_CHOICE = re.compile(r"invalid choice '(.*)' for argument '--([\w.-]+)'")
_ASSIGNMENT = re.compile(r"[\w.-]*\w=")
ConfigOfRecipe = Annotated[Config, tyro.conf.arg(name="")]
"""The type of a command's field for the config. The options of the config's keys have no prefix."""


def parse(command: type[Command], default: Command, prog: str, arguments: list[str]) -> Command:
    """Parse a command's arguments on top of its defaults; tyro prints `--help` and exits.

    Raises:
        HelpPrinted: `--help` was printed.
        InputError: an option is unknown, or a value is missing, malformed or out of range.
    """
    options = options_of(command)
    with redirect_stderr(StringIO()) as errors:
        try:
            words = expand_short_forms(arguments, options)
            style = {"config": STYLE, "description": described(command)}
            parsed = tyro.cli(command, default=default, prog=prog, args=words, registry=rules(), **style)
        except SystemExit as end:
            if not end.code:
                raise HelpPrinted(end.code) from None
            message = _message(errors.getvalue(), arguments, options)
            # The error of a config section contains the key. The error of a function that parses one value does not, so
            # the option is taken from tyro's message. The reason is taken from the error, because tyro folds lines.
            if (cause := _input_error(end)) is not None:
                if not message.startswith(_OF_OPTION):
                    raise cause from None
                message = f"{message.partition(': ')[0]}: {cause}"
            raise InputError(f"{message}; see {prog} --help") from None
    check_values(parsed, "--")
    return parsed


def _input_error(error: BaseException | None) -> InputError | None:
    """Return the `InputError` among an error's causes, or None."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


def _message(box: str, arguments: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return the first paragraph of tyro's boxed error message as a line. For unknown options, add similar options."""
    inside = [line.strip(_SIDES).strip() for line in box.splitlines()[1:-1]]
    # If there are no box characters, the title is followed by a horizontal line.
    lines = itertools.dropwhile(operator.not_, ("" if {*line} <= {*_RULES} else line for line in inside))
    first = " ".join(itertools.takewhile(bool, lines))
    if (choice := _CHOICE.match(first)) and (key := choice[2].replace("-", "_")) in options:
        checked(choice[1], options[key], f"--{choice[2]}")
    if not first.startswith(_UNKNOWN):
        return first
    unknown = first.removeprefix(_UNKNOWN).split(", ")
    for flag, word in itertools.pairwise(part for argument in arguments for part in argument.split("=", 1)):
        if word == unknown[0] and is_flag(options.get(flag.removeprefix("--").replace("-", "_"))):
            return f"{flag} {word}: expected True or False"
    names = [word.partition("=")[0].removeprefix("--") for word in unknown if word.startswith("--")]
    similar = dict.fromkeys(format_option(key) for name in names for key in similar_keys(name, options))
    if assigned := [word.partition("=") for word in unknown if _ASSIGNMENT.match(word)]:
        # `train.batch_size=64`, and also `--set train.batch_size=64`, as in other programs.
        similar = {
            f"{format_option(key)} {value}": None
            for name, _, value in assigned
            for key in ([name] if name in options else similar_keys(name, options))
        }
    return f"{first}; perhaps you mean {' or '.join(similar)}" if similar else first


def parse_recipe(
    command: type[Command], prog: str, arguments: list[str], *, measures: bool = False
) -> tuple[Command, RecipeFile]:
    """Parse the arguments of a command whose first argument is a config, a recipe file or a run.

    Args:
        measures: whether the command evaluates a run. If True, the settings in the run's work directory are used.

    Returns:
        The command, and the recipe file with the overridden config.

    Raises:
        InputError: the recipe cannot be read, or an unused key is set; see also `parse`.
    """
    name, *rest = arguments
    if name in HELP:
        page, shown = page_of(command)
        parse(page, shown, prog, [name])
    check_one_config(name, rest)
    workdir = workdir_of(recipe_path(name))
    has_workdir = any(field.name == "workdir" for field in fields(cast(Any, command)))
    run_workdir = Path(option(rest, "--workdir") or workdir) if has_workdir else None
    # The default time limit applies to reading the recipe, because the recipe's own limit is not known yet.
    watch_alone(Config().parallel.stall_timeout)
    with phase("start", f"reading {name}"):
        file = _measured(name, run_workdir) if measures and run_workdir else read_recipe(name)
    return _with_options(command, prog, arguments, file, run_workdir, workdir, measures=measures)


def parse_weights(command: type[Command], prog: str, arguments: list[str]) -> tuple[Command, RecipeFile]:
    """Parse the arguments of a command whose first argument is weights, as in `model.weights`.

    Returns: see `parse_recipe`. The config has the settings of the weights, as far as they are known.
    """
    name = arguments[0]
    file = RecipeFile(Config().replace(model={"weights": name}), Path(name), RecipeSources(Path(name)))
    return _with_options(command, prog, arguments, file, None, Path(), measures=False)


def _with_options(
    command: type[Command],
    prog: str,
    arguments: list[str],
    file: RecipeFile,
    run_workdir: Path | None,
    workdir: Path,
    *,
    measures: bool,
) -> tuple[Command, RecipeFile]:
    """Return the command and the recipe file with the overridden config.

    Args:
        run_workdir: the work directory of the run.
        workdir: its default.
    """
    name, *rest = arguments
    make: Any = command
    keys = {field.name for field in fields(make)}
    entries = by_key(rest, options_of(command))
    keys_set = {key for key, _ in entries}
    file = file.set_by_command(keys_set & dict(keys_of(Config)).keys())
    weights = option(rest, "--model.weights") or ("" if file.stored else file.config.model.weights)
    if weights and not measures:
        from jaxddp.workdir.inherited_settings import with_settings_of_weights

        offline = value_of_flag(entries, "model.offline", options_of(command), file.config.model.offline)
        file = with_settings_of_weights(file, weights, run_workdir, offline=offline)
    defaults = {"config": file.config, "workdir": workdir}
    default = make(**{key: defaults[key] for key in keys & defaults.keys()})
    if {*HELP} & {*rest}:
        default = replace(default, config=_chosen(file.config, entries))
        page, shown = page_of_config(default, file.hooks)
        parse(page, shown, f"{prog} {name}", rest)
    options: Any = parse(command, default, f"{prog} {name}", rest)
    check_names(options.config, file.hooks)
    file = overridden(file, reset_unread(options.config, keys_set, file.hooks))
    check_read(file.config, file.hooks, lambda keys: _advice(keys, entries, f"{prog} {name}", file.path))
    if file.taken.keys:
        from jaxddp.workdir.inherited_settings import with_notice

        file = with_notice(file, str(weights))
    return replace(options, config=file.config), file


def _chosen(config: Config, entries: Sequence[tuple[str, list[str]]]) -> Config:
    """Return the config with the choices on the command line, such as the optimizer, for `--help`."""
    for key, (first, *more) in entries:
        if key in NAMES and (name := first.partition("=")[2] or "".join(more[:1])):
            section, _, last = key.partition(".")
            config = config.replace(**{section: {last: name}})
    return config


def _advice(keys: Sequence[str], entries: Sequence[tuple[str, list[str]]], begin: str, path: Path) -> str:
    """Return advice about unused keys: a command without them, or the keys to remove from the recipe."""
    on_command_line = [key for key, _ in entries if key in keys]
    in_recipe = [key for key in keys if key not in on_command_line]
    words = [word for key, words in entries if key not in keys for word in words]
    advice = [f"leave {', '.join(in_recipe)} out of {path}"] if in_recipe else []
    return "; ".join([*advice, f"{shlex.join([*begin.split(), *words])} would do"] if on_command_line else advice)


def overridden(file: RecipeFile, config: Config) -> RecipeFile:
    """Return a recipe file with another config. Changed keys lose their mark as settings that come from a run."""
    before, data = file.config.data, config.data
    # A path replaces a name, and a name replaces a path.
    if data.path != before.path and data.name == before.name:
        config = config.replace(data={"name": None})
    elif data.name != before.name and data.path == before.path:
        config = config.replace(data={"path": None})
    old, new = flatten(file.config.to_dict()), flatten(config.to_dict())
    keys = frozenset(key for key in file.taken.keys if old[key] == new[key])
    return replace(file, config=config, taken=replace(file.taken, keys=keys))


def option(words: Sequence[str], name: str) -> str | None:
    """Return the value of a single option without parsing the other options; None if the option is absent."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(name, nargs="?", dest="value")
    return parser.parse_known_args(words)[0].value


def _measured(name: str, workdir: Path) -> RecipeFile:
    """Return the saved settings of the run in a work directory if they are complete, else the recipe file."""
    saved = workdir / CONFIG_FILE
    if not saved.is_file():
        return read_recipe(name)
    run = read_recipe(saved)
    if not run.has_network:
        return read_recipe(name)
    is_named = recipe_path(name).absolute() == saved.absolute()
    notice = "" if is_named else f"{saved}: the run's own settings are used instead of those of {name}"
    return replace(run, taken=TakenSettings(notice=notice))


def check_run(directory: Path) -> None:
    """Raise `InputError` if a work directory does not exist."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such work directory; give one that a run wrote into")


def workdir_of(path: str | Path) -> Path:
    """Return the default work directory for a config's file: the folder of a `config.json`, else `runs/NAME`."""
    return Path(path).parent if Path(path).name == CONFIG_FILE else Path("runs") / Path(path).stem
