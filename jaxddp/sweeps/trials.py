"""The trials of a sweep: the values of its keys, the command of each trial, and a name that shows these values.

The values of a key are a list `a,b,c`, whole numbers `A:B`, or for a search an interval `A..B`.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_origin

from jaxddp.config.registry import NAMES
from jaxddp.config.values import Text, bare, checked
from jaxddp.core.errors import InputError, Key, format_option
from jaxddp.core.ranges import real_number, whole_number

MOST_TRIALS = 10_000
FOLD, VAL_FOLD = "data.fold", "data.val_fold"
_INTEGERS = re.compile(r"(\d+):(\d+)")
_INTERVAL = re.compile(r"(.+?)\.\.(.+?)(:log)?")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_UNITS = "(?:epochs?|steps?|examples?)"
_READABLE = re.compile(rf"[\d.]{{1,20}} {_UNITS}|\d{{1,20}}/\d{{1,20}}")
_LIKE_READABLE = re.compile(rf"[\d.]{{1,20}}-{_UNITS}|\d{{1,20}}-of-\d{{1,20}}")
"""Durations and folds, and the file names for them."""
_LONGEST_VALUE, _LONGEST_NAME = 40, 150
_SPLIT_TEXTS = {"optimizer.schedule", "model.batch_norm", "model.weight_init", "model.weights", *NAMES}
_SPLIT_TEXTS |= {"data.path", "data.name", FOLD, VAL_FOLD, "objective.teacher", "data.augment.policy"}
"""The keys of type text whose values contain no commas."""


Values = Mapping[str, str]
"""The word of each key that a sweep varies, in one trial."""
TrialEnd = Literal["done", "failed", "interrupted", "pruned", "elsewhere", "bad input"]
"""How a trial ended. "elsewhere" means that another process trains in its work directory."""


@dataclass
class Trial:
    """A run of a sweep.

    Attributes:
        name: the name of its work directory, within the folder of the sweep.
        values: the word of each key that the sweep varies.
        words: the arguments of `jaxddp train`, without the work directory.
        ended: "pruned" or "failed", if the sweep does not continue the trial for this reason; else None.
        finished_words: the arguments with which the sweep last saw the trial finish. With other arguments, such as a
            longer duration, the trial is started again.
        recipe: a digest of its settings and its hooks, which differs after the recipe file was edited.
    """

    name: str
    values: dict[str, str]
    words: list[str]
    ended: Literal["pruned", "failed"] | None = None
    finished_words: list[str] | None = None
    recipe: str = ""

    def command(self, folder: Path) -> list[str]:
        """Return all arguments of `jaxddp`."""
        return ["train", *self.words, "--workdir", str(folder / self.name)]


@dataclass(frozen=True)
class Choices:
    """Some values of a key, as words of a command line."""

    words: tuple[str, ...]

    def __contains__(self, word: str) -> bool:
        return word in self.words

    # Optuna's values are the words.
    param = word = staticmethod(str)

    def distribution(self) -> Any:
        """Return Optuna's distribution of the values."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.words)


@dataclass(frozen=True)
class Interval:
    """An interval of numbers, which only a search can use.

    Attributes:
        low: the least number, which is included.
        high: the largest number, which is included.
        whole: whether only whole numbers are suggested.
        log: whether numbers are suggested on a logarithmic scale.
    """

    low: float
    high: float
    whole: bool = False
    log: bool = False

    def __contains__(self, word: str) -> bool:
        with suppress(ValueError):
            return self.low <= self.param(word) <= self.high
        return False

    @property
    def words(self) -> tuple[str, str]:
        """The bounds."""
        return self.word(self.low), self.word(self.high)

    def distribution(self) -> Any:
        """Return Optuna's distribution of the numbers."""
        from optuna.distributions import FloatDistribution, IntDistribution

        kind: Any = IntDistribution if self.whole else FloatDistribution
        return kind(self.low, self.high, log=self.log)

    def param(self, word: str) -> float:
        """Return the number of a word. Raises: ValueError."""
        return whole_number(word) if self.whole else real_number(word)

    def word(self, value: float) -> str:
        """Return a number of the interval as a word, rounded to four significant digits if it is not whole."""
        return str(int(value)) if self.whole else repr(min(max(float(f"{value:.4g}"), self.low), self.high))


Space = Choices | Interval


def space_of(key: str, hint: Any, texts: Sequence[str]) -> Space | None:
    """Return the values that a sweep tries for a key; None if the key has only one value.

    A text has several values if it is `a,b,c`; `A:B` (A to B - 1), for a key of whole numbers; or `A..B` or `A..B:log`,
    for a key of numbers. If the option is given several times, the last text counts, as in `jaxddp train`. Values of
    some keys may contain commas (`is_split`): these are not split, and the option is given once for each value.

    Args:
        hint: the type of the key.
        texts: the values of the option on the command line, in their order.

    Raises: InputError if a list has an empty value, or the bounds of an interval are wrong.
    """
    kind, text = bare(hint), texts[-1]
    if not is_split(key, hint):
        return Choices(tuple(texts)) if len(texts) > 1 else None
    if kind in (int, float) and (found := _INTERVAL.fullmatch(text)):
        low, high = (checked(Text(word), hint, key) for word in found.group(1, 2))
        if not low < high or (found[3] and low <= 0):
            raise InputError(Key(key, text), ": an interval A..B has A below B, and above 0 with :log")
        return Interval(low, high, kind is int, bool(found[3]))
    if kind is int and (found := _INTEGERS.fullmatch(text)):
        start, stop = map(int, found.group(1, 2))
        if not start < stop <= start + MOST_TRIALS:
            advice = f"A:B are the numbers from A to B - 1, 1 to {MOST_TRIALS:,} numbers"
            raise InputError(Key(key, text), ": is no range", advice=advice)
        return Choices(tuple(map(str, range(start, stop))))
    if "," not in text:
        return None
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise InputError(Key(key, text), ": a value of the list is empty", advice="give a,b,c")
    return Choices(words)


def is_split(key: str, hint: Any) -> bool:
    """Return whether the text of a key is split at commas. Other texts, such as `model.freeze`, may contain commas."""
    return key in _SPLIT_TEXTS or not (bare(hint) is str or get_origin(bare(hint)) is tuple)


@dataclass(frozen=True)
class Template:
    """The arguments of `jaxddp train` for all trials, in the order of the command line.

    Attributes:
        config: the name or path of the config.
        entries: the words of each option. An option that the sweep varies has no value, and is found by its key.
        spaces: the values of each varied key.
    """

    config: str
    entries: Mapping[str, tuple[str, ...]]
    spaces: Mapping[str, Space]

    def words(self, values: Values) -> list[str]:
        """Return the arguments of a trial with these words for the varied keys."""
        words = [self.config]
        for key, entry in self.entries.items():
            value = [values[key]] if key in self.spaces else []
            # An option that ends in "=" is one word with its value.
            words += [entry[0] + value[0]] if value and entry[0].endswith("=") else [*entry, *value]
        return words

    def with_folds(self, count: int) -> "Template":
        """Return a template that also varies the fold."""
        spaces = {**self.spaces, FOLD: Choices(tuple(all_folds(count)))}
        return replace(self, entries={**self.entries, FOLD: (format_option(FOLD),)}, spaces=spaces)

    def grid(self) -> Iterator[dict[str, str]]:
        """Yield every combination of the values. The last key varies fastest.

        Raises: InputError if a key has an interval, or there are too many combinations.
        """
        if interval := [key for key, space in self.spaces.items() if isinstance(space, Interval)]:
            advice = "a grid has a,b,c, or A:B for whole numbers"
            raise InputError(Key(interval[0]), ": an interval A..B needs --search optuna", advice=advice)
        lists = [space.words for space in self.spaces.values()]
        if (number := math.prod(map(len, lists))) > MOST_TRIALS:
            raise InputError(f"the grid has {number:,} trials; a sweep has at most {MOST_TRIALS:,}")
        return (dict(zip(self.spaces, words, strict=True)) for words in itertools.product(*lists))


def all_folds(count: int) -> list[str]:
    """Return the values of `data.fold` for this many folds."""
    return [f"{number}/{count}" for number in range(count)]


def trial_name(values: Mapping[str, Any]) -> str:
    """Return the name of a trial, a file name: `learning_rate=0.001__seed=0`.

    It depends only on the keys and values of the trial, so that a trial keeps its name when a sweep gets more values.
    Different values have different names.

    Args:
        values: the values of the varied keys in the trial's config, as JSON types.
    """
    name = "__".join(f"{name}={_text(values[key])}" for key, name in short_names([*values]).items())
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_digest(repr(dict(values)))}"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, such as "learning_rate"; "model" for "model.name"; or the key if ambiguous."""
    short = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return {key: name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)}


def _text(value: Any) -> str:
    """Return a value as a part of a file name. If this changes the text, a digest of the text is added."""
    text = str(value)
    if _READABLE.fullmatch(text):
        return text.replace(" ", "-").replace("/", "-of-")
    safe = _UNSAFE.sub("-", text)
    if safe == text and len(text) <= _LONGEST_VALUE and not _LIKE_READABLE.fullmatch(text):
        return text
    # The end of a path tells more than its beginning.
    return f"{safe[-_LONGEST_VALUE:].strip('-')}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
