"""Reads environment variables. An error about a value names the variable."""

import string
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxddp.core.errors import InputError, show
from jaxddp.core.ranges import Range, whole
from jaxddp.job.messages import MOST_PROCESSES

Environ = Mapping[str, str]
COUNT, INDEX = Range(1, MOST_PROCESSES), Range(0, MOST_PROCESSES - 1)
"""The bounds of a number of processes, and of the id of a process."""
_LONGEST_TEXT = 1000


class EnvValue(NamedTuple):
    """A value and its environment variable, or several variables separated by ", "."""

    value: str
    variable: str


Lookup = str | Callable[[Environ], EnvValue | None]
"""A variable; several, separated by ", ", whose values are joined by ":"; or a function. An empty text is none."""


def lookup(environ: Environ, source: Lookup) -> EnvValue | None:
    """Return a value; None if a variable is empty or not set."""
    if not isinstance(source, str):
        return source(environ)
    # Like other programs, do not strip a no-break space.
    values = [environ.get(name, "").strip(string.whitespace) for name in source.split(", ")]
    return EnvValue(":".join(values), source) if all(values) else None


def number(setting: EnvValue, bounds: Range) -> int:
    """Return a value as a whole number. Raises InputError if it is not a whole number or is out of bounds."""
    value = whole(setting.value, bounds)
    if value is None:
        # Digits of other scripts may look like ASCII digits.
        digits = "" if setting.value.isascii() else ", in the digits 0 to 9"
        raise InputError(f"{setting.variable}={show(setting.value)}: expected a whole number from {bounds}{digits}")
    return value


def index_below(setting: EnvValue, count: int, reason: str) -> int:
    """Return a value as a whole number from 0 to `count - 1`. Raises InputError, with the reason for this count."""
    index = number(setting, INDEX)
    if index >= count:
        raise InputError(f"{setting.variable}={index}: expected 0 to {count - 1}, {reason}")
    return index


def text(environ: Environ, variable: str) -> str:
    """Return a variable's text, which is sent to other processes; empty if the variable is not set.

    Raises: InputError if the text is too long, or has unprintable characters.
    """
    value = environ.get(variable, "")
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        # The error does not quote the text, because it may be a secret.
        raise InputError(f"{variable}: expected at most {_LONGEST_TEXT:,} characters, all of them printable")
    return value
