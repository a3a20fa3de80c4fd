"""Ranges of numbers, for the types of config keys: `width: Annotated[int, Range(1, 4096)] = 64`."""

from dataclasses import dataclass
from typing import Annotated

_MOST_DIGITS = 20


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`. NaN and infinities are in no range.

    Attributes:
        above: whether `least` itself is excluded.
        below: whether `most` itself is excluded.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether a number lies in the range."""
        lowest = self.least < value if self.above else self.least <= value
        return bool(lowest and (value < self.most if self.below else value <= self.most))

    def __str__(self) -> str:
        """Describe the range for a message: `above 0, at most 1`."""
        if not (self.above or self.below):
            return f"{_plain(self.least)} to {_plain(self.most)}"
        first, last = "above" if self.above else "at least", "below" if self.below else "at most"
        return f"{first} {_plain(self.least)}, {last} {_plain(self.most)}"


Share = Annotated[float, Range(0, 1)]
"""A fraction, 0 to 1."""
SomeShare = Annotated[float, Range(0, 1, above=True)]
"""A fraction above 0."""
Decay = Annotated[float, Range(0, 1, below=True)]
"""A fraction below 1: the decay of a moving average."""
HeldOut = Annotated[float, Range(0, 1, above=True, below=True)]
"""A fraction above 0 and below 1."""
Seconds = Annotated[float, Range(0, 1_000_000, above=True)]
"""A time limit."""
Factor = Annotated[float, Range(0, 1_000_000)]
"""A learning rate, or a factor of a learning rate or a loss."""
WeightDecay = Annotated[float, Range(0, 100)]
Positive = Annotated[float, Range(0, 1_000_000, above=True)]
"""A number above 0."""
Growth = Annotated[float, Range(1, 1_000_000, above=True)]
"""A factor above 1."""
Period = Annotated[int, Range(1, 1_000_000)]
"""A number of steps, validations or checkpoints."""
Seed = Annotated[int, Range(0, 2**63 - 1)]
"""A seed. Int64 is the widest type that NumPy, TensorFlow and JAX have in common for seeds."""
Count = Annotated[int, Range(1, 2**31 - 1)]
"""A number of examples. It fits int32, the type of the rows of a `Batch`."""
Devices = Annotated[int, Range(1, 100_000)]
CpuDevices = Annotated[int, Range(1, 1024)]
"""A number of simulated CPU devices."""


def whole_number(text: str) -> int:
    """Parse a whole number in ASCII digits. Raises: ValueError."""
    return int(in_ascii(text))


def real_number(text: str) -> float:
    """Parse a number in ASCII digits, with a point, an exponent, or a word such as "inf". Raises: ValueError."""
    return float(in_ascii(text))


def in_ascii(text: str) -> str:
    """Check that the text of a number is ASCII, and return it. Raises: ValueError."""
    # `int` and `float` also parse digits of other scripts.
    if not text.isascii():
        raise ValueError(f"{text!r} is not written in the digits 0 to 9")
    return text


def whole(text: str, bounds: Range) -> int | None:
    """Parse a whole number in ASCII digits; return None if the text is no number or is out of bounds."""
    # `int` also parses digits of other scripts, and raises an error for thousands of digits.
    short = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if short and int(text) in bounds else None


def _plain(value: float) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:g}"
