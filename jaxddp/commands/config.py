"""`jaxddp config CONFIG`: print every setting of a config with the source of its value, or as a recipe file."""

import contextlib
from dataclasses import dataclass
from typing import Literal

from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe
from jaxddp.command_line.terminal import print_table
from jaxddp.command_line.words import by_key, options_of
from jaxddp.config import Config
from jaxddp.config.registry import CHOICES, SCHEDULES, effective_settings
from jaxddp.core.errors import InputError
from jaxddp.recipe.file import RecipeFile, read_recipe
from jaxddp.recipe.text import line_of, written


@dataclass(frozen=True)
class ShowConfig:
    """Print every setting in use with the source of its value: the default, a line of the config, a run or an option.

    Example: jaxddp config digits --model.width 32
    """

    config: ConfigOfRecipe
    format: Literal["table", "yaml", "json"] = "table"
    """yaml or json: print a recipe file that trains the same, for `jaxddp train FILE`."""


def run(arguments: list[str]) -> None:
    """Run the command. The first argument is a config or a run. Raises: InputError."""
    options, file = parse_recipe(ShowConfig, "jaxddp config", arguments)
    if options.format != "table":
        # The hooks of a recipe are Python, so the file has the recipe as its base.
        recipe = read_recipe(arguments[0])
        # A name that replaces a hook is written, even if it is the same.
        named = {kind.key for kind in CHOICES if kind.hook in recipe.hooks.keys() - file.hooks.keys()}
        base = str(file.path.absolute()), {key: v for key, v in recipe.config.flat().items() if key not in named}
        print(written(file.config, base if file.hooks else None, options.format), end="")
        return
    from jaxddp.workdir.claim import with_absolute_paths

    origins, config = _origins(file, *arguments), file.config
    # The name of a data set may be unknown here.
    with contextlib.suppress(InputError):
        config = with_absolute_paths(config)
    values = effective_settings(Config, config.flat(), file.hooks)
    hooks = {kind.key: file.hooks[kind.hook] for kind in CHOICES if kind.hook in file.hooks and kind is not SCHEDULES}
    shown = {key: (_text(value), origins[key]) for key, value in values.items()}
    shown |= {key: (f"{hook.function.__name__}()", str(hook.path)) for key, hook in hooks.items()}
    print_table(("key", "value", "from"), [(key, *row) for key, row in shown.items()])


def _text(value: object) -> str:
    """Return a value as text, without the middle of a long list."""
    if not isinstance(value, list):
        return str(value)
    return " ".join(map(str, value if len(value) < 10 else [*value[:3], "…", *value[-2:]]))


def _origins(file: RecipeFile, name: str, *words: str) -> dict[str, str]:
    """Return the source of each value: a config, a run, the line of a recipe file, an option, or "default"."""
    default, recipe = (config.flat() for config in (Config(), read_recipe(name).config))
    options = {key: first.partition("=")[0] for key, (first, *_) in by_key(words, options_of(ShowConfig))}
    origins = {}
    for key, value in file.config.flat().items():
        if key in file.taken:
            origins[key] = str(file.config.model.weights)
        elif key in options or value != recipe[key]:
            origins[key] = options.get(key, "option")
        elif value == default[key]:
            origins[key] = "default"
        else:
            origins[key] = name if (line := line_of(file.path, key)) is None else f"{name}:{line}"
    return origins
