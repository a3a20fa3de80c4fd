"""The values of a key in a sweep: a list `a,b,c`, whole numbers `A:B`, or for a search an interval `A..B`."""

import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from jaxddp.choices import NAMES
from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import real_number, whole_number
from jaxddp.overrides import checked

MOST_TRIALS = 10_000
_DIGITS = 4
"""The significant digits of a number that a search suggests."""
_INTEGERS = re.compile(r"(\d+):(\d+)")
_INTERVAL = re.compile(r"(.+?)\.\.(.+?)(:log)?")
_SPLIT_TEXTS = frozenset(
    {
        *NAMES,
        *("optimizer.schedule", "model.batch_norm", "model.weight_init", "model.weights"),
        *("data.path", "data.name", "objective.teacher"),
    }
)
"""The keys of type text whose values contain no commas."""


@dataclass(frozen=True)
class Choices:
    """Some values of a key, as words of a command line."""

    words: tuple[str, ...]

    def __contains__(self, word: str) -> bool:
        return word in self.words


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
        try:
            return self.low <= (whole_number(word) if self.whole else real_number(word)) <= self.high
        except ValueError:
            return False

    def word(self, value: float) -> str:
        """Return a number of the interval as a word, rounded to four digits if it is not whole."""
        if self.whole:
            return str(int(value))
        return repr(min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high))


Space = Choices | Interval


def space_of(key: str, hint: Any, texts: Sequence[str]) -> Space | None:
    """Return the values that a sweep tries for a key; None if the key has only one value.

    A text has several values if it is `a,b,c`; `A:B` (A to B - 1), for a key of whole numbers; or `A..B` or `A..B:log`,
    for a key of numbers. If the option is given several times, the last text counts, as in `jaxddp train`. Values of
    some keys may contain commas (`is_split`): these are not split, and the option is given once for each value.

    Args:
        hint: the type of the key.
        texts: the values of the option on the command line, in their order.

    Raises:
        InputError: a list has an empty value, or the bounds of an interval are wrong.
    """
    kind, text = _bare(hint), texts[-1]
    if not is_split(key, hint):
        return Choices(tuple(texts)) if len(texts) > 1 else None
    if kind in (int, float) and (found := _INTERVAL.fullmatch(text)):
        return _interval(key, hint, text, found[1], found[2], log=found[3] is not None, whole=kind is int)
    if kind is int and (found := _INTEGERS.fullmatch(text)):
        start, stop = map(int, found.groups())
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
    return key in _SPLIT_TEXTS or _bare(hint) not in (str, tuple)


def _interval(key: str, hint: Any, text: str, first: str, last: str, *, log: bool, whole: bool) -> Interval:
    read = whole_number if whole else real_number
    try:
        low, high = (checked(read(word), hint, key) for word in (first, last))
    except InputError:
        raise
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise InputError(Key(key, text), f": the bounds of an interval A..B are {kind}") from None
    if not low < high:
        raise InputError(Key(key, text), ": the first bound of an interval A..B is less than the second")
    if log and low <= 0:
        raise InputError(Key(key, text), ": the bounds of a logarithmic interval are above 0")
    return Interval(low, high, whole, log)


def _bare(hint: Any) -> Any:
    """Return a type without its range and without None; `tuple` for a tuple of values."""
    origin = typing.get_origin(hint)
    if origin in (Annotated, types.UnionType, typing.Union):
        return _bare(typing.get_args(hint)[0])
    return tuple if origin is tuple else hint
