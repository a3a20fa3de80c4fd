"""Variables of an environment: what is found in one remembers which, so that an error can name it."""

import string
from collections.abc import Mapping
from typing import NamedTuple

from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Range, whole
from jaxddp.core.wording import show
from jaxddp.wire.codec import MOST_PROCESSES

Environ = Mapping[str, str]
COUNT, INDEX = Range(1, MOST_PROCESSES), Range(0, MOST_PROCESSES - 1)
"""How many there are of something of a job, and which of them one is."""
HANDLES = Range(0, 2**20)
"""Of open files, that one process passes on to another."""
_LONGEST_TEXT = 1000


class Found(NamedTuple):
    """A value, and the variable that holds it; several, with ", " between them, where it takes more than one."""

    value: str
    variable: str


def look(environ: Environ, variable: str | None) -> Found | None:
    """The value of a variable; an empty one counts as not set."""
    # A no-break space is no blank to other programs either.
    value = environ.get(variable, "").strip(string.whitespace) if variable else ""
    return Found(value, variable) if value and variable else None


def number(found: Found, bounds: Range) -> int:
    """The whole number that was found. Raises: InputError; it is none, or out of bounds."""
    value = whole(found.value, bounds)
    if value is None:
        # Other scripts' digits look the same.
        digits = "" if found.value.isascii() else ", in the digits 0 to 9"
        raise InputError(f"{found.variable}={show(found.value)}: expected a whole number from {bounds}{digits}")
    return value


def text(environ: Environ, variable: str) -> str:
    """The text of a variable, which goes to other processes; empty where it is not set. Raises: InputError."""
    value = environ.get(variable, "")
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        # It may be a secret.
        raise InputError(f"{variable}: expected at most {_LONGEST_TEXT:,} characters, all of them printable")
    return value
