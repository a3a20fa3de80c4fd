"""The trials of a sweep: the command of each, and a name that shows the values in which it differs."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError, Key
from jaxddp.sweeps.spaces import MOST_TRIALS, Choices, Space

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_DURATION, _LIKE_DURATION = (re.compile(rf"[\d.]{{1,20}}{between}(epochs?|steps?|examples?)") for between in " -")
_LONGEST_VALUE, _LONGEST_NAME = 40, 150
_DIGEST = 8
"""The hexadecimal digits of a digest in a name."""


@dataclass(frozen=True)
class Trial:
    """A run of a sweep.

    Attributes:
        name: the name of its work directory, within the folder of the sweep.
        values: the word of each key that the sweep varies.
        words: the arguments of `jaxddp train`, without the work directory.
    """

    name: str
    values: Mapping[str, str]
    words: tuple[str, ...]

    def command(self, folder: Path) -> list[str]:
        """Return all arguments of `jaxddp`."""
        return ["train", *self.words, "--workdir", str(folder / self.name)]


@dataclass(frozen=True)
class Template:
    """The arguments of `jaxddp train` for all trials, in the order of the command line.

    Attributes:
        config: the name or path of the config.
        entries: the words of each option. The value of a varied option is left out.
        keys: for each entry, the key that the sweep varies; None for other options.
        spaces: the values of each varied key.
    """

    config: str
    entries: tuple[tuple[str, ...], ...]
    keys: tuple[str | None, ...]
    spaces: Mapping[str, Space]

    def words(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """Return the arguments of a trial with these words for the varied keys."""
        entries = (
            entry if key is None else _with_value(entry[0], values[key])
            for key, entry in zip(self.keys, self.entries, strict=True)
        )
        return (self.config, *itertools.chain.from_iterable(entries))

    def grid(self) -> Iterator[dict[str, str]]:
        """Yield every combination of the values. The last key varies fastest.

        Raises:
            InputError: a key has an interval, or there are too many combinations.
        """
        lists, number = [], 1
        for key, space in self.spaces.items():
            if not isinstance(space, Choices):
                advice = "a grid has a,b,c, or A:B for whole numbers"
                raise InputError(Key(key), ": an interval A..B needs --search optuna", advice=advice)
            lists.append(space.words)
            number *= len(space.words)
        if number > MOST_TRIALS:
            raise InputError(f"the grid has {number:,} trials; a sweep has at most {MOST_TRIALS:,}")
        return (dict(zip(self.spaces, words, strict=True)) for words in itertools.product(*lists))


def _with_value(option: str, word: str) -> tuple[str, ...]:
    return (option + word,) if option.endswith("=") else (option, word)


def trial_name(values: Mapping[str, Any]) -> str:
    """Return the name of a trial, a file name: `learning_rate=0.001__seed=0`.

    It depends only on the keys and values of the trial, so that a trial keeps its name when a sweep gets more values.
    Different values have different names.

    Args:
        values: the values of the varied keys in the trial's config, as JSON types.
    """
    names = short_names(list(values))
    name = "__".join(f"{names[key]}={_text(value)}" for key, value in values.items())
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_digest(repr(dict(values)))}"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, such as "learning_rate"; "model" for "model.name"; or the key if ambiguous."""
    short = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
    last = list(short.values())
    return {key: name if last.count(name) == 1 else key for key, name in short.items()}


def _text(value: Any) -> str:
    """Return a value as a part of a file name. If this changes the text, a digest of the text is added."""
    text = str(value)
    if _DURATION.fullmatch(text):
        return text.replace(" ", "-")
    safe = _UNSAFE.sub("-", text)
    if safe == text and len(text) <= _LONGEST_VALUE and not _LIKE_DURATION.fullmatch(text):
        return text
    # The end of a path tells more than its beginning.
    return f"{safe[-_LONGEST_VALUE:].strip('-')}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
