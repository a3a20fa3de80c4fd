"""Parses a command line into a dataclass with tyro: the types of values, `--help`, and one-line errors."""

import inspect
import itertools
import operator
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

import jaxddp.config.registry as registry
from jaxddp.command_line.words import by_key, config_and_words, expand_short_forms, is_flag, option, options_of
from jaxddp.config import Config
from jaxddp.config.values import HELP, SHORT, Text, bare, check_values, differing, is_tree, keys_of, similar_keys
from jaxddp.core.duration import Duration
from jaxddp.core.errors import HelpPrinted, InputError, chain, format_option, key_of_option
from jaxddp.core.files import check_path, nearest_beside
from jaxddp.core.phases import phase
from jaxddp.core.process_exit import watch_alone
from jaxddp.recipe.file import RecipeFile, read_recipe
from jaxddp.recipe.sources import CONFIG_FILE, TEXT_FILES, config_names, recipe_path

STYLE = (tyro.conf.PositionalMetavarFromFieldName,)
"""Positional arguments have the names of their fields: RUN, IMAGES."""
Command = TypeVar("Command")
_SIDES, _RULES = "│| ", "─-"
"""The vertical and horizontal lines around tyro's messages, on a terminal with box characters or without."""
_UNKNOWN, _MISSING = "Unrecognized options: ", "Missing from "
_LAUNCH = "jaxddp launch --nodes N --gpus K --nr RANK -- train …"
_OF_LAUNCH = ("nodes", "gpus", "nr", "processes", "restarts", "nnodes", "nproc_per_node", "node_rank", "world_size")
ConfigOfRecipe = Annotated[Config, tyro.conf.arg(name="")]
"""The type of a command's field for the config. The options of the config's keys have no prefix."""
_VALUES = {"lr": "X", "epochs": "N", "batch_size": "B", "model": "NAME", "data": "DIR", "seed": "N", "offline": ""}
"""The first options of a page, and the names of their values; empty for a flag."""
_NOTE_ON_KEYS = "Every key of CONFIG is an option, too: --help after CONFIG lists them with its values."
_COMPLETION = "jaxddp completion bash, or zsh, prints the script that completes commands, configs, keys and values."


def parse(command: type[Command], default: Command, prog: str, arguments: list[str]) -> Command:
    """Parse a command's arguments on top of its defaults.

    Raises:
        HelpPrinted: `--help` was printed.
        InputError: an option is unknown, or a value is missing, malformed or out of range.
    """
    options, registry = options_of(command), ConstructorRegistry()
    # For a positional argument, the message of tyro does not name an option.
    registry.primitive_rule(lambda info: None if tyro.conf.Positional in info.markers else _spec_of(info.type))
    # Only the pages of `--help` show flags as such; the words give each flag a value.
    style = (*STYLE, tyro.conf.FlagConversionOff)
    if {*HELP} & {*arguments}:
        style, default = STYLE, _shown(default)
        command = type(default)
    given = {"default": default, "prog": prog, "args": expand_short_forms(arguments, options), "config": style}
    with redirect_stderr(StringIO()) as errors:
        try:
            parsed = tyro.cli(command, registry=registry, description=inspect.getdoc(command), **given)
        except SystemExit as end:
            if not end.code:
                raise HelpPrinted(end.code) from None
            # The error of a config section says more than tyro's message about it.
            cause = next((error for error in chain(end) if isinstance(error, InputError)), None)
            message = f"{_message(errors.getvalue(), arguments, options)}; see {prog} --help" if cause is None else ""
            raise cause or InputError(message) from None
    check_values(parsed, "--")
    return parsed


def _message(box: str, arguments: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return the first paragraph of tyro's boxed error message as a line, with options similar to unknown ones."""
    # On a terminal, the message has escape sequences for styles.
    inside = [line.strip(_SIDES).strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:-1]]
    # If there are no box characters, the title is followed by a horizontal line.
    lines = itertools.dropwhile(operator.not_, ("" if {*line} <= {*_RULES} else line for line in inside))
    first = " ".join(itertools.takewhile(bool, lines))
    if first.startswith(_MISSING):
        # The name and the description of each argument end with this word.
        missing = [words.split()[0] for words in first.partition(":")[2].split("(required)") if words.strip()]
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    if not first.startswith(_UNKNOWN):
        return first.rstrip(".")
    unknown = first.removeprefix(_UNKNOWN).split(", ")
    for flag, word in itertools.pairwise(part for argument in arguments for part in argument.split("=", 1)):
        if word == unknown[0] and is_flag(options.get(key_of_option(flag))):
            return f"{flag} {word}: expected True or False"
    similar = dict.fromkeys([_LAUNCH] if {*_OF_LAUNCH} & {*map(key_of_option, unknown)} else ())
    for word in unknown:
        # `train.batch_size=64`, and also `--set train.batch_size=64`, as in other programs.
        name, equals, value = word.removeprefix("--").partition("=")
        if equals or name != word:
            keys = [name] if name in options else similar_keys(name, options)
            similar |= dict.fromkeys(f"{format_option(key)} {value}".strip() for key in keys)
    return f"{first}; perhaps you mean {' or '.join(similar)}" if similar else first


def parse_recipe(
    command: type[Command], prog: str, arguments: list[str], *, measures: bool = False, of_weights: bool = False
) -> tuple[Command, RecipeFile]:
    """Parse the arguments of a command whose first argument is a config, a recipe file or a run.

    With `measures`, the command evaluates a run with the settings in its work directory. With `of_weights`, the first
    argument is weights, as in `model.weights`, and the config has their settings, as far as they are known.

    Return the command, and the recipe file with the overridden config. Raises: InputError if the recipe cannot be read,
    or an unused key is set; see also `parse`.
    """
    name, rest = config_and_words(prog.removeprefix("jaxddp "), arguments)
    if name in HELP:
        parse(*page_of(command), prog, [name])
    workdir = None if of_weights else workdir_of(recipe_path(name))
    if workdir is None:
        file = RecipeFile(Config().replace(model={"weights": name}), Path(name))
    else:
        # The default time limit applies to reading the recipe, because the recipe's own limit is not known yet.
        watch_alone(Config().parallel.stall_timeout)
        with phase("start", f"reading {name}"):
            file = _measured(name, Path(option(rest, "--workdir") or workdir)) if measures else read_recipe(name)
    of_recipe = "" if file.is_run else file.config.model.weights
    weights = "" if measures else option(rest, "--model.weights") or of_recipe or ""
    prog, options = f"{prog} {name}", options_of(command)
    entries = by_key(rest, options)
    set_keys = {key for key, _ in entries}
    file = file.layered(set_keys & dict(keys_of(Config)).keys(), {})
    if weights:
        from jaxddp.workdir.signature import recognized_file, with_settings_of_weights

        offline = option(expand_short_forms(rest, options), "--model.offline") or str(file.config.model.offline)
        run_workdir = Path(option(rest, "--workdir") or workdir) if workdir and "workdir" in options else None
        file = with_settings_of_weights(file, weights, run_workdir, offline=offline == str(True))
        # The arrays of a file tell its network, unless the command names it.
        if workdir is None and "model.name" not in set_keys:
            file = recognized_file(file, weights)
    own = {"config": file.config} | ({"workdir": workdir or Path()} if "workdir" in options else {})
    default: Any = command(**own)
    if {*HELP} & {*rest}:
        chosen = {key: name for key in registry.NAMES if (name := option(rest, format_option(key)))}
        parse(*page_of_config(replace(default, config=file.config.replace(**chosen)), file.hooks), prog, rest)
    parsed: Any = parse(command, default, prog, rest)
    registry.check_names(parsed.config, file.hooks)
    before, config = file.config, registry.reset_unread(parsed.config, set_keys, file.hooks)
    # A path replaces a name, and a name replaces a path.
    changed = [key for key in ("path", "name") if getattr(config.data, key) != getattr(before.data, key)]
    if len(changed) == 1:
        config = config.replace(data={"name" if changed == ["path"] else "path": None})
    # Changed keys lose their mark as settings that come from a run.
    file = replace(file, config=config, taken=file.taken - differing(before, config))
    registry.check_read(file.config, file.hooks, lambda keys: _advice(keys, entries, prog, file.path))
    if file.taken:
        from jaxddp.workdir.signature import with_notice

        file = with_notice(file, weights)
    return replace(parsed, config=file.config), file


def _advice(keys: Sequence[str], entries: Sequence[tuple[str, list[str]]], begin: str, path: Path) -> str:
    """Return a command without unused keys, or the keys to remove from the recipe."""
    on_command_line = [key for key, _ in entries if key in keys]
    in_recipe = [key for key in keys if key not in on_command_line]
    words = [word for key, words in entries if key not in keys for word in words]
    advice = [f"leave {', '.join(in_recipe)} out of {path}"] if in_recipe else []
    return "; ".join([*advice, f"{shlex.join([*begin.split(), *words])} would do"] if on_command_line else advice)


def _measured(name: str, workdir: Path) -> RecipeFile:
    """Return the saved settings of the run in a work directory if they are complete, else the recipe file."""
    saved = workdir / CONFIG_FILE
    run = read_recipe(saved) if saved.is_file() else None
    if run is None or not run.has_network:
        return read_recipe(name)
    is_named = recipe_path(name).absolute() == saved.absolute()
    notice = "" if is_named else f"{saved}: the run's own settings are used instead of those of {name}"
    return replace(run, notice=notice)


_OR_WEIGHTS = ", or weights as `jaxddp weights` lists them, a .safetensors or .pth file, or a recipe with model.weights"


def _existing(directory: Any, otherwise: str = "") -> Path:
    if not (path := Path(check_path(directory, "RUN"))).is_dir():
        problem = f"{path}: no such work directory{nearest_beside(path)}"
        raise InputError(f"{problem}; give one that a run wrote into{otherwise}")
    return path


RunDirectory = Annotated[Path, _existing]
"""The type of a command's field for the work directory of a run, which exists."""


@dataclass(frozen=True)
class OfRun:
    """The base of a command that reads its network from a run, or from weights; see `parse_network`."""

    run: tyro.conf.Positional[Annotated[Path, partial(_existing, otherwise=_OR_WEIGHTS)]] = tyro.MISSING
    """The work directory of the run. In its place, weights as in model.weights: a name, a file, hf://owner/name; or a
    recipe with model.weights. The keys of a config that describe the network and its images are then options."""
    step: str = "best"
    """The checkpoint: latest, best, or its step. Without validations, best is the latest."""


def parse_network(command: type[Command], prog: str, arguments: list[str]) -> tuple[Any, Path | RecipeFile]:
    """Parse the arguments of a command whose first argument is a run, weights, or a recipe with weights.

    `command` has the bases (options, `OfRun`). For weights, `config` takes the place of the fields of `OfRun`. Returns:
    the command, and the work directory of the run or the recipe.
    """
    from jaxddp.weights.places import is_weights

    first = Path(arguments[0] if arguments else "-")
    if first.name == CONFIG_FILE:
        arguments = [str(first.parent), *arguments[1:]]
    of_weights = not str(first).startswith("-") and is_weights(arguments[0])
    if of_weights or (first.suffix in (".py", *TEXT_FILES) and first.name != CONFIG_FILE):
        config: Any = [("config", ConfigOfRecipe, field(default=tyro.MISSING))]
        derived: Any = make_dataclass(command.__name__, config, bases=command.__bases__[:1], frozen=True)
        derived.__doc__ = command.__doc__
        return parse_recipe(derived, prog, arguments, of_weights=of_weights)
    options: Any = parse(command, command(), prog, arguments)
    return options, getattr(options, "run", first)


def images_of(options: Any, words: Sequence[str]) -> list[str]:
    """Return the images of a command: its positional words, or else the value of --data, or of a recipe."""
    of_run = getattr(options, "data_path", None)
    if words and of_run is not None:
        raise InputError(f"--data {of_run}: the images are given already, {words[0]}; leave one of them out")
    path = options.config.data.path if hasattr(options, "config") else of_run
    return [*words] or ([] if path is None else [path])


def workdir_of(path: str | Path) -> Path:
    """Return the default work directory for a config's file: the folder of a `config.json`, else `runs/NAME`."""
    return Path(path).parent if Path(path).name == CONFIG_FILE else Path("runs") / Path(path).stem


def _spec_of(kind: Any) -> PrimitiveConstructorSpec | None:
    """Return tyro's specification of a value; None for another type, such as a section of a config.

    A word that is no value of the type is kept: `check_values` rejects it later, with the same message as in Python.
    Tyro turns a union of a dataclass and None into subcommands.
    """
    inner: Any = bare(kind)
    several, optional = get_origin(inner) is tuple, type(None) in get_args(kind)
    parts = [bare(part) for part in get_args(inner)] if several else [inner]
    if parts[0] not in (bool, int, float, str, Duration, Path) and get_origin(parts[0]) is not Literal:
        return None
    choices = (True, False) if inner is bool else get_args(parts[0])
    name = f"{{{','.join(map(str, choices))}}}" if choices else parts[0].__name__.upper()
    many = several and parts[-1] is ...
    metavar = f"[{name} [{name} ...]]" if many else " ".join([name] * len(parts))

    def value(words: list[str]) -> Any:
        return None if optional and words == ["None"] else [*map(Text, words)] if several else Text(words[0])

    return PrimitiveConstructorSpec(
        nargs="*" if many else len(parts),
        metavar=f"{{None}}|{metavar}".replace("}|{", ",") if optional else metavar,
        instance_from_str=value,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [*map(str, value)] if isinstance(value, tuple) else [str(value)],
    )


def page_of(command: type, *, optional: bool = False) -> tuple[Any, Any]:
    """Return a command's dataclass and defaults for `--help` with CONFIG in place of the keys.

    `optional` is whether the command also runs without a config.
    """
    paths: dict[str, Any] = {entry.name: Path("runs/CONFIG") for entry in fields(command) if entry.default is MISSING}
    file = "the path of a recipe file (Python with get_config(), YAML or JSON)"
    names = f"A name ({', '.join(config_names())}), {file}, or the work directory of a run. Also as --config CONFIG."
    shown = tyro.conf.arg(help=names, help_behavior_hint="(optional)" if optional else None)
    word: Any = Annotated[str, tyro.conf.Positional, shown]
    page = _derived(command, [("config", word, MISSING)], _first_options({}), notes=[_NOTE_ON_KEYS, _COMPLETION])
    return page, page(**paths | {"config": "" if optional else tyro.MISSING})


def page_of_config(command: Any, hooks: Collection[str]) -> tuple[Any, Any]:
    """Return a command's dataclass and defaults for `--help` after a config, without unused keys.

    For a key of None, the page shows the default of the choice that reads it, such as an optimizer.
    """
    config = registry.with_defaults(command.config)
    values = config.flat()
    unread = {key for key, need in registry.unmet(Config, values, hooks).items() if need.key in registry.NAMES}
    shown = _shown(config, {*unread, "seed"})
    whole: Any = Annotated[type(shown), tyro.conf.arg(name="")]
    page = _derived(type(command), [("config", whole, shown)], _first_options(values), notes=[_COMPLETION])
    return page, page(**vars(command) | {"config": shown})


def _first_options(values: Mapping[str, Any]) -> type:
    """Return a dataclass of `_VALUES` with defaults from a config. As a base, it puts them before other options."""
    options = []
    for key, metavar in _VALUES.items():
        description = f"Short for {format_option(SHORT[key])}." if key in SHORT else "Seed of all random values."
        value = values.get(SHORT.get(key, key))
        hint = "" if value is None else f"(default: {value})"
        shown = tyro.conf.arg(help=description, metavar=metavar, help_behavior_hint=hint)
        option: Any = Annotated[str, shown] if metavar else Annotated[bool, shown, tyro.conf.FlagCreatePairsOff]
        options.append((key, option, field(default="" if metavar else False, kw_only=True)))
    return make_dataclass("FirstOptions", options, frozen=True)


def _shown(section: Any, hidden: Collection[str] = (), prefix: str = "") -> Any:
    """Return a copy of a command, a config or a section without hidden keys, and with descriptions that tyro folds."""
    shown = []
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        key, value = prefix + name, getattr(section, name)
        if key in hidden:
            hint = tyro.conf.Suppress[hint]
        elif is_tree(hint):
            value = _shown(value, hidden, f"{key}.")
            hint = type(value)
        elif text := registry.description(key, type(section)):
            hint = Annotated[hint, tyro.conf.arg(help=text)]
        if kind := registry.LISTED.get(key):
            default = " ".join(value) if isinstance(value, tuple) else value
            names = f"(default: {default}; there are: {', '.join(kind.names())})"
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint=names)]
        shown.append((name, hint, value))
    return _derived(type(section), shown)()


def _derived(kind: type, changed: Iterable[tuple[str, Any, Any]], *bases: type, notes: Sequence[str] = ()) -> Any:
    """Return a subclass of a dataclass with other types and defaults for some fields, further bases, and notes."""
    redefined = [(name, hint, field(default=value)) for name, hint, value in changed]
    description = "\n\n".join([inspect.getdoc(kind) or "", *notes])
    options = {"namespace": {"__doc__": description}, "frozen": True, "kw_only": True}
    return make_dataclass(kind.__name__, redefined, bases=(kind, *bases), **options)
