"""`jaxddp config CONFIG`: every setting of a config as a run would have it, and where each is from."""

from dataclasses import dataclass
from typing import Any

from jaxddp.commands.parse import ConfigOfRecipe, parse_recipe
from jaxddp.commands.screen import print_table
from jaxddp.commands.spelling import options_of, spelled_out
from jaxddp.config import Config
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RecipeFile, read_recipe


@dataclass(frozen=True)
class ShowConfig:
    """Print every setting, and whether it is the default, the config's or the run's, or an option's.

    Example: jaxddp config digits --model.width 32
    """

    config: ConfigOfRecipe


def run(arguments: list[str]) -> int:
    """Run the command, whose first argument is a config or a run; returns the exit code. Raises: InputError."""
    _, file = parse_recipe(ShowConfig, "jaxddp config", arguments)
    from jaxddp.workdir.places import saved_places

    now, origins = saved_places(flatten(file.config.to_dict())), _origins(file, *arguments)
    print_table(("key", "value", "from"), [(key, _typed(value), origins[key]) for key, value in now.items()])
    return 0


def _origins(file: RecipeFile, name: str, *words: str) -> dict[str, str]:
    """Where the value of each key is from, in a word."""
    default, recipe = (flatten(config.to_dict()) for config in (Config(), read_recipe(name).config))
    spelled = spelled_out(words, options_of(ShowConfig))
    options = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in spelled}
    found = {}
    for key, value in flatten(file.config.to_dict()).items():
        if key in file.taken:
            found[key] = str(file.config.model.weights)
        elif key in options or value != recipe[key]:
            found[key] = "option"
        else:
            found[key] = "default" if value == default[key] else name
    return found


def _typed(value: Any) -> str:
    """As it is written at the terminal."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
