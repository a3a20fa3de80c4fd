"""Formats an error for the command line, with the option on the command line or the line of the recipe file."""

import shlex
from collections.abc import Iterator, Sequence

from jaxddp.core.errors import InputError, JaxddpError, Key, format_option, key_of_option
from jaxddp.keys import SHORT
from jaxddp.recipe_files.find_recipe import is_built_in, recipe_path
from jaxddp.recipe_files.key_lines import line_of

_LONGEST = 80


def format_error(error: JaxddpError, arguments: Sequence[str]) -> str:
    """Return the line that a command prints for an error.

    If the command line sets the key, the line begins with the option: `--train.batch-size 30 cannot be divided …`. If
    line 7 of the recipe file sets the key, it begins with `my.py:7: train.batch_size=30 cannot be divided …`.
    """
    options = dict(_options(arguments))
    location = None if error.key is None or error.key in options else _location(error, arguments)
    error.rename_keys(lambda key: _as_option(key, options))
    return str(error) if location is None else f"{location}: {error}"


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each key of a command line with its option: `--lr`, `--train.batch-size`."""
    for word in words:
        if key := key_of_option(word):
            section, dot, last = key.rpartition(".")
            full_key = SHORT.get(key, f"{section}{dot}{last.removeprefix('no_')}")
            yield full_key, word.partition("=")[0] if key in SHORT else format_option(full_key)


def _as_option(key: Key, options: dict[str, str]) -> str:
    # In some errors the key is already an option, such as --workdir.
    option = options.get(key_of_option(key.name) or key.name)
    if option is None:
        return str(key)
    return f"{option} {_as_word(key)}" if key.has_value else option


def _as_word(key: Key) -> str:
    """Return the value of a key as words of a command line."""
    values = key.value if isinstance(key.value, list | tuple) else [key.value]
    words = shlex.join(map(str, values))
    return words if len(words) <= _LONGEST and words.isprintable() else key.shown_value


def _location(error: JaxddpError, arguments: Sequence[str]) -> str | None:
    """Return the file and line of the user's recipe that set the first key of an error; None if there is none."""
    (first, *_) = error.about[0] if error.about else error.problem
    if not isinstance(first, Key) or first.rendered is not None:
        return None
    names = [word for word in arguments[1:3] if not word.startswith("-")]
    try:
        path = recipe_path(names[-1] if arguments[:2] == ["data", "show"] else names[0])
    except (InputError, IndexError):
        return None
    line = None if is_built_in(path) else line_of(path, first.name)
    return None if line is None else f"{path}:{line}"
