"""The words of a command line before tyro parses it: short forms, flags, the config; and the option of an error."""

import contextlib
import itertools
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxddp.config.values import SHORT, TRUTHS, bare, keys_of
from jaxddp.core.errors import InputError, JaxddpError, Key, format_option, key_of_option
from jaxddp.recipe.sources import is_built_in, recipe_path

CONFIG_OPTION = "--config"
_LONGEST = 80


def config_first(words: list[str]) -> list[str]:
    """Return the words of a command with the config in place of a leading `--config`: `--config my.yaml` is my.yaml."""
    name, equals, value = words[0].partition("=") if words else ("", "", "")
    if name != CONFIG_OPTION or not (equals or words[1:]):
        return words
    return [value, *words[1:]] if equals else words[1:]


def check_one_config(name: str, words: Sequence[str]) -> None:
    """Raise `InputError` if the words after a config contain another config, `--config my.yaml`."""
    for word, following in itertools.pairwise([*words, "FILE"]):
        if word.partition("=")[0] == CONFIG_OPTION:
            other = word.partition("=")[2] or following
            advice = f"write `base: {name}` into {other}, and give {other} as the config"
            raise InputError(f"{CONFIG_OPTION} {other}: the config is {name} already; {advice}")


def options_of(command: type) -> dict[str, Any]:
    """Return the type of each option of a command, by its key: "train.batch_size" for `--train.batch-size`."""
    import tyro

    keys = ((key.removeprefix("config."), hint) for key, hint in keys_of(command))
    return {key: hint for key, hint in keys if tyro.conf.Positional not in getattr(hint, "__metadata__", ())}


def is_flag(hint: Any) -> bool:
    """Return whether an option of this type is a flag, which needs no value."""
    return bare(hint) is bool


def expand_short_forms(words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Replace the short forms and the values of flags in the words of a command line.

    `--epochs 5` becomes `--train.duration "5 epochs"`, and `--data.augment.flip false` becomes
    `--data.augment.no-flip`.

    Raises:
        InputError: the words contain a short form and its key.
    """
    return list(_flags(_full_names(words, options), options))


def by_key(words: Sequence[str], options: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return a pair for each option of a command line: its key, and the words of the option and its value."""
    entries: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not entries:
            key = key_of_option(word)
            entries.append((_flag(word, options)[0] or (key if key in options else SHORT.get(key, key)), [word]))
        else:
            entries[-1][1].append(word)
    return entries


def words_without(words: Sequence[str], options: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Return the words of a command line without the options of some keys, and without their values."""
    return [word for key, words_of_key in by_key(words, options) if key not in keys for word in words_of_key]


def _full_names(words: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    keys, previous = {key_of_option(word) for word in words}, ""
    for word in words:
        name, equals, value = word.partition("=")
        key, full_key = key_of_option(word), SHORT.get(key_of_option(word), "")
        if previous == "epochs" and not word.startswith("--"):
            yield _epochs(word)
        elif full_key in options and key not in options:
            if full_key in keys:
                problem = f"{name} is short for {format_option(full_key)}, which is given too"
                raise InputError(problem, advice="leave one of them out")
            yield format_option(full_key) + equals + (_epochs(value) if key == "epochs" and equals else value)
        else:
            yield word
        previous = "" if equals or full_key not in options else key


def _flags(words: Iterable[str], options: Mapping[str, Any]) -> Iterator[str]:
    is_value = False
    for word, following in itertools.pairwise([*words, ""]):
        if is_value:
            is_value = False
            continue
        key, on = _flag(word, options)
        _, equals, value = word.partition("=")
        text = value if equals else following
        has_truth = text.lower() in TRUTHS
        if key is None or (equals and not has_truth):
            yield word
            continue
        is_value, on = has_truth and not equals, _truth(on, text)
        if options[key] is bool:
            section, dot, last = key.rpartition(".")
            yield format_option(key if on else f"{section}{dot}no_{last}")
        else:
            yield from (format_option(key), str(on))


def _truth(on: bool, text: str) -> bool:
    """Return the value of a flag that is followed by a text. `on` is its value if the text is no truth value."""
    truth = TRUTHS.get(text.lower())
    return on if truth is None else on == truth


def _flag(word: str, options: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the key of the flag in a word, or None, and whether the word without a value sets the flag to True."""
    key = key_of_option(word)
    if is_flag(options.get(key)):
        return key, True
    section, dot, last = key.rpartition(".")
    inverted = (f"{section}{dot}{last.removeprefix('no_')}", key.removeprefix("no_"))
    return next(((key, False) for key in inverted if is_flag(options.get(key))), (None, False))


def _epochs(text: str) -> str:
    """Return the text of a duration with its unit. The default unit is epochs."""
    return text if " " in text.strip() or "%" in text else f"{text} epochs"


def format_error(error: JaxddpError, arguments: Sequence[str]) -> str:
    """Return the line that a command prints for an error.

    If the command line sets the key, the line begins with the option: `--train.batch-size 30 cannot be divided …`. If
    line 7 of the recipe file sets the key, it begins with `my.py:7: train.batch_size=30 cannot be divided …`.
    """
    options = dict(_options_given(arguments))
    location = None if error.key is None or error.key in options else _line_of_recipe(error, arguments)
    error.rename_keys(lambda key: _as_option(key, options))
    return str(error) if location is None else f"{location}: {error}"


def _options_given(words: Sequence[str]) -> Iterator[tuple[str, str]]:
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


def _line_of_recipe(error: JaxddpError, arguments: Sequence[str]) -> str | None:
    """Return the file and line of the user's recipe that set the first key of an error; None if there is none."""
    from jaxddp.recipe.text import line_of

    (first, *_) = error.about[0] if error.about else error.problem
    if not isinstance(first, Key) or first.rendered is not None:
        return None
    names = [word for word in arguments[1:3] if not word.startswith("-")]
    with contextlib.suppress(InputError, IndexError):
        path = recipe_path(names[-1] if arguments[:2] == ["data", "show"] else names[0])
        if not is_built_in(path) and (line := line_of(path, first.name)) is not None:
            return f"{path}:{line}"
    return None
