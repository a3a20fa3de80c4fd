"""The words of a command line, before tyro reads them: short forms of keys, and truth values behind flags."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tyro

from jaxddp.core.errors import InputError
from jaxddp.core.message import typed, untyped
from jaxddp.keys import SHORT
from jaxddp.overrides import keys_of

_TRUTHS = {"true": True, "false": False}


def options_of(command: type) -> dict[str, Any]:
    """The options of a command by their keys, "train.batch_size", and the type of each; those of a recipe without a
    prefix."""
    keys = ((key.removeprefix("config."), hint) for key, hint in keys_of(command))
    return {key: hint for key, hint in keys if tyro.conf.Positional not in getattr(hint, "__metadata__", ())}


def is_flag(hint: Any) -> bool:
    """Whether an option of this type is on by its name alone."""
    return hint in (bool, bool | None)


def spelled_out(words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The words with short forms as what they stand for (`--epochs 5` is `--train.duration "5 epochs"`), and with truth
    values in the names of flags (`--data.augment.flip false` is `--data.augment.no-flip`).

    Raises:
        InputError: a short form and its key are both there.
    """
    return list(_flags(_whole(words, options), options))


def by_key(words: Sequence[str], options: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The options of a command line by their keys, each with its words, those of its value too."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not found:
            key = untyped(word)
            found.append((_flag(word, options)[0] or (key if key in options else SHORT.get(key, key)), [word]))
        else:
            found[-1][1].append(word)
    return found


def words_without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command's words without these options, such as "--out", and their values."""
    left, skipped = list[str](), False
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if skipped:
            skipped = False
        elif name in options:
            skipped = not equals
        else:
            left.append(word)
    return left


def _whole(words: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    given, before = {untyped(word) for word in words}, ""
    for word in words:
        name, equals, value = word.partition("=")
        key, whole = untyped(word), SHORT.get(untyped(word), "")
        if before == "epochs" and not word.startswith("--"):
            yield _epochs(word)
        elif whole in options and key not in options:
            if whole in given:
                raise InputError(f"{name} is short for {typed(whole)}, which is given too; leave one of them out")
            yield typed(whole) + equals + (_epochs(value) if key == "epochs" and equals else value)
        else:
            yield word
        before = "" if equals or whole not in options else key


def _flags(words: Iterable[str], options: Mapping[str, Any]) -> Iterator[str]:
    taken = False
    for word, following in itertools.pairwise([*words, ""]):
        if taken:
            taken = False
            continue
        key, on = _flag(word, options)
        _, equals, value = word.partition("=")
        said = _TRUTHS.get((value if equals else following).lower())
        if key is None or (equals and said is None):
            yield word
            continue
        taken, on = said is not None and not equals, on if said is None else on == said
        if options[key] is bool:
            section, dot, last = key.rpartition(".")
            yield typed(key if on else f"{section}{dot}no_{last}")
        else:
            yield from (typed(key), str(on))


def _flag(word: str, options: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The key of the flag that a word names, and whether the name alone says that it is on."""
    key = untyped(word)
    if is_flag(options.get(key)):
        return key, True
    section, dot, last = key.rpartition(".")
    inverted = (f"{section}{dot}{last.removeprefix('no_')}", key.removeprefix("no_"))
    return next(((each, False) for each in inverted if is_flag(options.get(each))), (None, False))


def _epochs(text: str) -> str:
    """A number alone counts epochs."""
    return text if " " in text.strip() or "%" in text else f"{text} epochs"
