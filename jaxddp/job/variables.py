"""Variables of an environment: what is found in one remembers which, so that an error can name it."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxddp.errors import InputError
from jaxddp.wording import show

Environ = Mapping[str, str]


class Found(NamedTuple):
    """A value, and the variable that holds it; several, with ", " between them, where it takes more than one."""

    value: str
    variable: str


def look(environ: Environ, variable: str | None) -> Found | None:
    """The value of a variable; an empty one counts as not set."""
    value = environ.get(variable, "").strip() if variable else ""
    return Found(value, variable) if value and variable else None


def number(found: Found, *, least: int) -> int:
    """The whole number that was found. Raises: InputError; it is none, or below `least`."""
    if not (found.value.isascii() and found.value.isdecimal() and int(found.value) >= least):
        raise InputError(f"{found.variable}={show(found.value)}: expected a whole number from {least}")
    return int(found.value)
