"""A command line becomes a dataclass: tyro, with our own readers of words."""

import itertools
import operator
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from jaxddp.commands.words import rules
from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.job.progress import doing
from jaxddp.overrides import check_values
from jaxddp.recipe_file import CONFIG_FILE, RecipeFile, read_recipe

Command = TypeVar("Command")
_SIDES, _RULES = "│| ", "─-"
"""Of the frame of a box, on terminals with such characters and without."""
ConfigOfRecipe = Annotated[Config, tyro.conf.arg(name="")]
"""The field of a command that holds a recipe's config, whose keys are options without a prefix."""


def parse(command: type[Command], default: Command, prog: str, arguments: list[str]) -> Command:
    """The command with its overrides; tyro answers `--help`, and ends the program.

    Raises:
        InputError: an option that is unknown, or a value that is none or out of its range.
    """
    with redirect_stderr(StringIO()) as said:
        try:
            parsed = tyro.cli(command, default=default, prog=prog, args=arguments, registry=rules())
        except SystemExit as end:
            if not end.code:
                raise
            raise InputError(f"{_told(said.getvalue())}; see {prog} --help") from None
    check_values(parsed, "--")
    return parsed


def _told(box: str) -> str:
    """What tyro says of a mistake, in a box of several parts, as one line: the first part, and the options it names."""
    inside = [line.strip(_SIDES).strip() for line in box.splitlines()[1:-1]]
    # A plain terminal has a rule under the title, too.
    lines = [*itertools.dropwhile(operator.not_, ("" if {*line} <= {*_RULES} else line for line in inside))]
    first = " ".join(itertools.takewhile(bool, lines))
    # A part begins behind a rule.
    options = [line.split()[0] for line in lines[lines.index("") if "" in lines else 0 :] if line.startswith("--")]
    near = [option.rstrip(",") for option in dict.fromkeys(options) if option not in first]
    return f"{first}; perhaps you mean {' or '.join(near[:3])}" if near else first


def parse_recipe(command: type[Command], prog: str, arguments: list[str]) -> tuple[Command, RecipeFile]:
    """As `parse`, of a command whose first word names a recipe file; and that file, with its config overridden."""
    name, *rest = arguments
    with doing(f"reading {name}"):
        file = read_recipe(name)
    make: Any = command
    known = {"config": file.config, "workdir": workdir_of(name)}
    default = make(**{field.name: known[field.name] for field in fields(make) if field.name in known})
    options: Any = parse(command, default, f"{prog} {name}", rest)
    return options, replace(file, config=options.config)


def check_run(directory: Path) -> None:
    """Raises `InputError` where there is no such directory."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such work directory; give one that a run wrote into")


def workdir_of(name: str) -> Path:
    """The default work directory of a config: that of a `config.json`, else `runs/NAME`."""
    return Path(name).parent if Path(name).name == CONFIG_FILE else Path("runs") / Path(name).stem
