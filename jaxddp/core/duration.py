"""Durations and cadences of a config."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from jaxddp.core.errors import InputError, show
from jaxddp.core.ranges import in_ascii

Unit = Literal["steps", "epochs", "examples", "%"]
# A Fraction is exact, so 1e999999999 would become an integer with a billion digits.
_TOO_LONG = re.compile(r".{100}|e[+-]?\d{3}", re.IGNORECASE)
_MOST = 10**18
_FORMS = '"90 epochs", "5000 steps", "1_000_000 examples" or "5%" (of the run)'


@dataclass(frozen=True)
class Duration:
    """A length of training, as an exact fraction of a unit: `Duration.parse("0.5 epochs")`.

    A duration is converted to a number of examples. An epoch is all N training examples, a step is B examples (the
    global batch size), and one percent is a hundredth of the examples of the run.
    """

    amount: Fraction
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Parse `"90 epochs"`, `"1 step"`, `"1_000_000 examples"` or `"5%"`.

        Raises: InputError if the text has another form, or its number is negative or above 10**18.
        """
        number, unit = text.strip(), ""
        if number.endswith("%"):
            number, unit = number[:-1], "%"
        elif number.count(" ") == 1:
            number, unit = number.split(" ")
            unit = unit if unit.endswith("s") else unit + "s"
        if unit in get_args(Unit) and not _TOO_LONG.search(number):
            with suppress(ValueError, ZeroDivisionError):
                if 0 <= (amount := Fraction(in_ascii(number.strip()))) <= _MOST:
                    return cls(amount, unit)  # pyright: ignore[reportArgumentType]
        raise InputError(f"{show(text)} is not a duration; write {_FORMS}, up to {_MOST:.0e}")

    def __str__(self) -> str:
        decimal = str(self.amount if self.amount.denominator == 1 else float(self.amount))
        # A fraction such as 1/3 has no exact decimal form.
        amount = decimal if Fraction(decimal) == self.amount else str(self.amount)
        return f"{amount}%" if self.unit == "%" else f"{amount} {self.unit[:-1] if self.amount == 1 else self.unit}"

    def examples(self, *, num_examples: int, batch_size: int, total_steps: int | None = None) -> Fraction:
        """Return the duration as a number of examples. Only a percentage needs `total_steps`, the length of the run.

        Raises: InputError if the duration is a percentage, and `total_steps` is None.
        """
        if self.unit == "%":
            if total_steps is None:
                advice = "write this duration in epochs, steps or examples"
                raise InputError(f'"{self}": a percentage needs a run of known length', advice=advice)
            return self.amount * total_steps * batch_size / 100
        return self.amount * {"steps": batch_size, "epochs": num_examples, "examples": 1}[self.unit]

    def steps(self, *, num_examples: int, batch_size: int, total_steps: int | None = None) -> int:
        """Return the duration as a number of steps, rounded up: E epochs are ceil(E * N / B) steps."""
        examples = self.examples(num_examples=num_examples, batch_size=batch_size, total_steps=total_steps)
        return math.ceil(examples / batch_size)


@dataclass(frozen=True)
class Cadence:
    """An event that happens every `examples` training examples. If `examples` is 0, it never happens."""

    examples: Fraction
    batch_size: int

    def count(self, step: int) -> int:
        """Return the number of times that the event happens until the end of step `step`; the first step is 1."""
        return math.floor(step * self.batch_size / self.examples) if self.examples else 0

    def following(self, step: int) -> int | None:
        """Return the first step after `step` at whose end the event happens; None if it never happens."""
        return math.ceil((self.count(step) + 1) * self.examples / self.batch_size) if self.examples else None

    def due(self, step: int, since: int | None = None) -> bool:
        """Return whether the event happens at the end of step `step`, or of an earlier step after step `since`."""
        return self.count(step) > self.count(step - 1 if since is None else since)
