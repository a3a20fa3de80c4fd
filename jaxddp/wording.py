"""The parts that error messages share: a value or a size shown on one line, and the nearest right name."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 80


def show(value: object) -> str:
    """`repr(value)`, cut to 80 characters: what a file holds may be long, or hold control characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` where one of the known names is near, else an empty string."""
    # Matching takes quadratic time, and no name that anybody meant to write is this long.
    close = get_close_matches(name, list(known), n=1) if len(name) <= _LONGEST else []
    return f", did you mean {close[0]!r}?" if close else ""


def size(num_bytes: float) -> str:
    """As people read it: `4.0 kB`, `102 MB`, `1.2 GB`."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while num_bytes >= 999.5 and unit != "TB":
        num_bytes, unit = num_bytes / 1000, next(units)
    return f"{num_bytes:.1f} {unit}" if num_bytes < 10 and unit != "B" else f"{num_bytes:.0f} {unit}"


def choices(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? there are: w, x, y`, for names few enough to list."""
    known = sorted(known)
    return f"{nearest(name, known)} there are: {', '.join(known)}".lstrip(", ")
