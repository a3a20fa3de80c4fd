"""The words of a command line before tyro parses it: short forms, flags, the config; and the option of an error."""

import contextlib
import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxddp.config.values import HELP, SHORT, TRUTHS, bare, keys_of
from jaxddp.core.errors import InputError, JaxddpError, Key, format_option, key_of_option
from jaxddp.recipe.sources import config_names, recipe_path

CONFIG_OPTION = "--config"
_LONGEST = 80


def config_first(words: list[str]) -> list[str]:
    """Return the words of a command with my.yaml in place of a leading `--config my.yaml`."""
    name, equals, value = words[0].partition("=") if words else ("", "", "")
    if name != CONFIG_OPTION or not (equals or words[1:]):
        return words
    return [value, *words[1:]] if equals else words[1:]


def config_and_words(command: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the config or `--help`, the first word after a command, and the other words.

    Raises: InputError if there is no config, or another one: `--config my.yaml`.
    """
    if not words or (words[0].startswith("-") and words[0] not in HELP):
        raise InputError(f"{command}: begin with a run, a recipe or a config; there are: {', '.join(config_names())}")
    for word, following in itertools.pairwise([*words[1:], "FILE"]):
        if word.partition("=")[0] == CONFIG_OPTION:
            other = word.partition("=")[2] or following
            advice = f"write `base: {words[0]}` into {other}, and give {other} as the config"
            raise InputError(f"{CONFIG_OPTION} {other}: the config is {words[0]} already; {advice}")
    return words[0], [*words[1:]]


def options_of(command: type) -> dict[str, Any]:
    """Return the type of each option of a command, by its key: "train.batch_size" for `--train.batch-size`."""
    import tyro

    keys = ((key.removeprefix("config."), hint) for key, hint in keys_of(command))
    return {key: hint for key, hint in keys if tyro.conf.Positional not in getattr(hint, "__metadata__", ())}


def is_flag(hint: Any) -> bool:
    """Return whether an option of this type is a flag, which needs no value."""
    return bare(hint) is bool


def expand_short_forms(words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Replace short forms (`--epochs 5` by `--train.duration "5 epochs"`), and give each flag a value.

    Raises: InputError if the words contain a short form and its key.
    """
    expanded, typed = list[str](), {key_of_option(word) for word in words}
    for key, (word, *texts) in by_key(words, options):
        name, equals, value = word.partition("=")
        values, short = [value, *texts] if equals else texts, key_of_option(word)
        if short in SHORT and short not in options and key in options:
            if key in typed:
                problem = f"{name} is short for {format_option(key)}, which is given too"
                raise InputError(problem, advice="leave one of them out")
            if short == "epochs" and values and not {" ", "%"} & {*values[0].strip()}:
                values[0] += " epochs"
            name = format_option(key)
        truth = TRUTHS.get("".join(values[:1]).lower())
        if is_flag(options.get(key)) and (truth is not None or not equals):
            is_inverted = short not in (key, *SHORT)
            on = (truth is not False) is not is_inverted
            rest = values if truth is None else values[1:]
            name, equals, values = format_option(key), "", [str(on), *rest]
        expanded += [f"{name}={values[0]}", *values[1:]] if equals else [name, *values]
    return expanded


def by_key(words: Sequence[str], options: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return a pair for each option of a command line: its key, and the words of the option and its value."""
    entries: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not entries:
            entries.append((_full_key(key_of_option(word), options), [word]))
        else:
            entries[-1][1].append(word)
    return entries


def option(words: Sequence[str], name: str) -> str | None:
    """Return the value of a single option without parsing the other options; None if the option is absent."""
    word, *texts = dict(by_key(words, {})).get(key_of_option(name), [""])
    _, equals, value = word.partition("=")
    return value if equals else next(iter(texts), None)


def _full_key(key: str, options: Mapping[str, Any]) -> str:
    """Return the key that is typed in a short form, or the key of an inverted flag: `--data.augment.no-flip`."""
    section, dot, last = key.rpartition(".")
    for positive in (f"{section}{dot}{last.removeprefix('no_')}", key.removeprefix("no_")):
        if key not in options and is_flag(options.get(positive)):
            return positive
    return key if key in options else SHORT.get(key, key)


def format_error(error: JaxddpError, arguments: Sequence[str]) -> str:
    """Return the line that a command prints for an error.

    It begins with the option of the key, `--train.batch-size 30 cannot be divided …`, or with the line of the recipe
    file that sets it, `my.py:7: train.batch_size=30 cannot be divided …`.
    """
    if error.key is None:
        return str(error)
    from jaxddp.config import Config

    entries = [(key, word.partition("=")[0]) for key, (word, *_) in by_key(arguments, dict(keys_of(Config)))]
    options = {key: word if key_of_option(word) in SHORT else format_option(key) for key, word in entries if key}
    location = None if error.key in options else _line_of_recipe(error, arguments)
    error.rename_keys(lambda key: as_option(key, options))
    return str(error) if location is None else f"{location}: {error}"


def as_option(key: Key, options: Mapping[str, str]) -> str:
    """Return the option of a key with its value as words of a command line; the key itself if it is not in options."""
    # In some errors the key is already an option, such as --workdir.
    typed = options.get(key_of_option(key.name) or key.name)
    if typed is None or not key.has_value:
        return typed or str(key)
    words = shlex.join(map(str, key.value if isinstance(key.value, list | tuple) else [key.value]))
    return f"{typed} {words if len(words) <= _LONGEST and words.isprintable() else key.shown_value}"


def _line_of_recipe(error: JaxddpError, arguments: Sequence[str]) -> str | None:
    """Return the file and line of the user's recipe that set the first key of an error; None if there is none."""
    from jaxddp.recipe.text import line_of

    first = error.problem[0]
    if not isinstance(first, Key) or first.rendered is not None:
        return None
    with contextlib.suppress(InputError, IndexError):
        first_word = 2 if arguments[:2] == ["data", "show"] else 1
        path = recipe_path(config_first([*arguments[first_word:]])[0])
        if (line := line_of(path, first.name)) is not None:
            return f"{path}:{line}"
    return None
