"""`jaxddp config CONFIG`: print every setting of a config with the source of its value."""

from dataclasses import dataclass
from typing import Any

from jaxddp.choices import effective_settings, unread_keys
from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe
from jaxddp.command_line.short_forms import by_key, options_of
from jaxddp.command_line.terminal import print_table
from jaxddp.config import Config
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RecipeFile, read_recipe


@dataclass(frozen=True)
class ShowConfig:
    """Print every setting in use with the source of its value: the default, the config, a run or an option.

    Example: jaxddp config digits --model.width 32
    """

    config: ConfigOfRecipe


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code. The first argument is a config or a run. Raises: InputError."""
    _, file = parse_recipe(ShowConfig, "jaxddp config", arguments)
    from jaxddp.workdir.paths import absolute_settings

    hidden, origins = unread_keys(file.config, file.hooks), _origins(file, *arguments)
    values = absolute_settings(effective_settings(flatten(file.config.to_dict()), file.hooks))
    rows = [(key, _typed(value), origins[key]) for key, value in values.items() if key not in hidden]
    print_table(("key", "value", "from"), rows)
    return 0


def _origins(file: RecipeFile, name: str, *words: str) -> dict[str, str]:
    """Return the source of the value of each key: a word for the table."""
    default, recipe = (flatten(config.to_dict()) for config in (Config(), read_recipe(name).config))
    options = {key for key, _ in by_key(words, options_of(ShowConfig))}
    origins = {}
    for key, value in flatten(file.config.to_dict()).items():
        if key in file.taken.keys:
            origins[key] = str(file.config.model.weights)
        elif key in options or value != recipe[key]:
            origins[key] = "option"
        else:
            origins[key] = "default" if value == default[key] else name
    return origins


def _typed(value: Any) -> str:
    """Return a value as words of a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
