"""Ranges of numbers, written beside the fields that they bound: `width: Annotated[int, Range(1, 4096)] = 64`."""

from dataclasses import dataclass
from typing import Annotated

_MOST_DIGITS = 20


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, without the ends that are open. NaN and infinities lie in none.

    Attributes:
        above, below: whether `least`, and `most`, are left out.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether a number lies in the range."""
        lowest = self.least < value if self.above else self.least <= value
        return bool(lowest and (value < self.most if self.below else value <= self.most))

    def __str__(self) -> str:
        """As an error message says it: `above 0, at most 1`."""
        if not (self.above or self.below):
            return f"{_plain(self.least)} to {_plain(self.most)}"
        first, last = "above" if self.above else "at least", "below" if self.below else "at most"
        return f"{first} {_plain(self.least)}, {last} {_plain(self.most)}"


Share = Annotated[float, Range(0, 1)]
"""A part of a whole."""
SomeShare = Annotated[float, Range(0, 1, above=True)]
"""Not nothing of it."""
Decay = Annotated[float, Range(0, 1, below=True)]
"""Not all of it: what is kept of a mean, or left to others."""
HeldOut = Annotated[float, Range(0, 1, above=True, below=True)]
"""Neither."""
Seconds = Annotated[float, Range(0, 1_000_000, above=True)]
"""A time to wait, which ends."""
Factor = Annotated[float, Range(0, 1_000_000)]
"""A learning rate, or what multiplies one or a loss."""
WeightDecay = Annotated[float, Range(0, 100)]
Positive = Annotated[float, Range(0, 1_000_000, above=True)]
"""A number above 0."""
Period = Annotated[int, Range(1, 1_000_000)]
"""Of steps, validations or checkpoints."""
Seed = Annotated[int, Range(0, 2**63 - 1)]
"""Seeds fit an int64, the widest integer that the orders, TensorFlow's and JAX's random keys have in common."""
Count = Annotated[int, Range(1, 2**31 - 1)]
"""Rows fit an int32, as they travel in a `Batch`."""
Devices = Annotated[int, Range(1, 100_000)]
CpuDevices = Annotated[int, Range(1, 1024)]
"""Simulated ones."""


def whole_number(text: str) -> int:
    """The number that a text is, in the digits 0 to 9. Raises: ValueError; others, or none."""
    return int(in_ascii(text))


def real_number(text: str) -> float:
    """As `whole_number`, with a point, an exponent, or a word such as "inf"."""
    return float(in_ascii(text))


def in_ascii(text: str) -> str:
    """The text of a number. Raises: ValueError; Python would read the digits of other scripts too, as of Arabic."""
    if not text.isascii():
        raise ValueError(f"{text!r} is not written in the digits 0 to 9")
    return text


def whole(text: str, bounds: Range) -> int | None:
    """The whole number within bounds that a text is, in ASCII digits alone; None where it is none."""
    # Python reads other scripts' digits too, and raises of thousands of them.
    short = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if short and int(text) in bounds else None


def _plain(value: float) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:g}"
