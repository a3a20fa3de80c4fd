"""Rewrites the short forms of keys and the values of flags in a command line before tyro parses it."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tyro

from jaxddp.core.errors import InputError, format_option, key_of_option
from jaxddp.keys import SHORT
from jaxddp.overrides import keys_of

_TRUTHS = {"true": True, "false": False}


def options_of(command: type) -> dict[str, Any]:
    """Return the type of each option of a command, by its key: "train.batch_size" for `--train.batch-size`."""
    keys = ((key.removeprefix("config."), hint) for key, hint in keys_of(command))
    return {key: hint for key, hint in keys if tyro.conf.Positional not in getattr(hint, "__metadata__", ())}


def is_flag(hint: Any) -> bool:
    """Return whether an option of this type is a flag, which needs no value."""
    return hint in (bool, bool | None)


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


def value_of_flag(
    entries: Iterable[tuple[str, list[str]]], key: str, options: Mapping[str, Any], default: bool
) -> bool:
    """Return the value of a flag in the result of `by_key`; `default` if it is absent."""
    for found, (word, *values) in entries:
        if found == key:
            name, is_on = _flag(word, options)
            on = name is None or is_on  # A short form is not among the options, and has no inverse.
            _, equals, value = word.partition("=")
            default = _truth(on, value if equals else "".join(values[:1]))
    return default


def words_without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command's words without some options, such as "--out", and without their values."""
    remaining, is_value = list[str](), False
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if is_value:
            is_value = False
        elif name in options:
            is_value = not equals
        else:
            remaining.append(word)
    return remaining


def _full_names(words: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    keys, previous = {key_of_option(word) for word in words}, ""
    for word in words:
        name, equals, value = word.partition("=")
        key, full_key = key_of_option(word), SHORT.get(key_of_option(word), "")
        if previous == "epochs" and not word.startswith("--"):
            yield _epochs(word)
        elif full_key in options and key not in options:
            if full_key in keys:
                raise InputError(
                    f"{name} is short for {format_option(full_key)}, which is given too; leave one of them out"
                )
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
        has_truth = text.lower() in _TRUTHS
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
    truth = _TRUTHS.get(text.lower())
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
