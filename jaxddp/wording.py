"""The parts that error messages share: a value or a size shown on one line, and the nearest right name."""

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 80
_PLAIN = (str, bytes, int, float, bool, list, tuple, dict, set, type(None))

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _LONGEST


def show(value: object) -> str:
    """`repr(value)`, cut to 80 characters: what a file holds may be long, or hold control characters."""
    return _cut(repr(value))


def refusal(name: str, value: object, advice: str) -> str:
    """What is said of an argument of the wrong kind: `k='5': give …`, or `model: a function was given; give …`.

    Values are shown, long ones in part; of anything else its type is named.
    """
    if type(value) in _PLAIN:
        return f"{name}={_cut(_shortened.repr(value))}: {advice}"
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
    return f"{name}: {kind} was given; {advice}"


def kind_of(value: object) -> str:
    """What is given, by its type: `None`, `the class Net`, `an object of type int`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def not_installed(package: str, extra: str) -> str:
    """That a package of one of the extras is missing, and what brings it."""
    return f"{package} is not installed; pip install 'jaxddp[{extra}]'"


def first_line(error: BaseException) -> str:
    """The first line of what an error says; JAX's say many, and some errors nothing."""
    return next(iter(str(error).splitlines()), "")


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


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
