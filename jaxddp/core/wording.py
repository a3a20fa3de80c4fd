"""Formatting of values, counts, figures and sizes in messages, and suggestions for mistyped names."""

import math
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, TypeVar

T = TypeVar("T")
_LONGEST = 80
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The characters that begin a formula in a spreadsheet, with their full-width forms."""
_POINTS = 8
"""The maximum number of code points of a name in a message."""
_DIFFERENT = ("<font>", "<super>", "<sub>", "<circle>", "<square>", "<fraction>")
"""Kinds of Unicode compatibility characters that look different from their decompositions: a double-struck H does not
look like an H."""
# Invisible characters besides format and control characters: joiners, fillers and variation selectors.
_HIDDEN = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Characters that `on_screen` escapes. Joiners stay, because they combine several characters into one."""
_SHARES = re.compile(r"top\d+|\w*accuracy\w*|exact_match")
"""The names of metrics that are fractions from 0 to 1."""
_PLAIN = (str, bytes, int, float, bool, list, tuple, dict, set, type(None))

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _LONGEST


def show(value: object) -> str:
    """Return `repr(value)`, cut to 80 characters. Text from files may be long or contain control characters."""
    return _cut(repr(value))


def on_screen(text: str) -> str:
    """Escape control characters, invisible characters, direction marks and bytes that are not UTF-8 for a terminal.

    The character ESC becomes `\\x1b`.
    """
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def as_text(cell: T) -> T | str:
    """Put an apostrophe before a cell that a spreadsheet would read as a formula.

    See OWASP, "CSV injection".
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def in_short(value: object) -> str | None:
    """Return the `repr` of a plain value, shortened; None for other objects."""
    return _cut(_shortened.repr(value)) if type(value) in _PLAIN else None


def kind_of(value: object) -> str:
    """Describe an object by its type: `None`, `the class Net`, `an object of type int`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def not_installed(package: str, extra: str) -> str:
    """Return the message for a missing package, with the extra that installs it."""
    return f"{package} is not installed; pip install 'jaxddp[{extra}]'"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which may have many lines or none."""
    return next(iter(str(error).splitlines()), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` if a known name is similar, else an empty string."""
    known = list(known)
    twin = next((other for other in known if other != name and appearance(other) == appearance(name)), None)
    if twin is not None and not (name + twin).isascii():
        points_of_twin, points = code_points(twin, name)
        return f", did you mean {twin!r} ({points_of_twin}, where this is {points})?"
    # Matching takes quadratic time, and every known name is shorter than the limit.
    close = get_close_matches(name, known, n=1) if len(name) <= _LONGEST else []
    return f", did you mean {close[0]!r}?" if close else ""


def appearance(name: str) -> str:
    """Return a normal form of a name. Names that look alike have the same form.

    It is Unicode's normal form C without invisible characters, with plain letters for ligatures and full-width letters,
    and with single spaces. Upper and lower case differ.
    """
    if not (name.isascii() and name.isprintable()):
        visible = (char for char in unicodedata.normalize("NFC", name) if char.isspace() or not _is_hidden(char))
        name = unicodedata.normalize("NFC", "".join(map(_compatible, visible)))
    return " ".join(name.split())


def code_points(name: str, other: str) -> tuple[str, str]:
    """Return the code points of two names, as `U+0061 U+200B`. In long names they begin at the first difference."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
    first = max(same - 1, 0) if max(len(name), len(other)) > _POINTS else 0

    def format_points(text: str) -> str:
        points = " ".join(f"U+{ord(char):04X}" for char in text[first : first + _POINTS])
        return f"{'…' * (first > 0)}{points}{'…' * (len(text) > first + _POINTS)}"

    return format_points(name), format_points(other)


def plural(number: float, noun: str) -> str:
    """Return the singular or plural of a noun after a number: `file` after 1, else `files`, `classes`, `tries`."""
    if number == 1:
        return noun
    if noun.endswith(("s", "x", "tch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `1,234 files`."""
    return f"{number:,} {plural(number, noun)}"


def span(least: float, most: float) -> str:
    """Return `4 to 9`, or `4` if both ends are equal."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def some(names: Sequence[str], most: int = 3) -> str:
    """Return a list of the first `most` names: `cat, dog, ...`."""
    return ", ".join([*map(_cut, names[:most]), *(["..."] if len(names) > most else [])])


def shaped(array: Any) -> str:
    """Describe an array by its dtype and shape: `float32[64, 10]`."""
    return f"{array.dtype}{list(array.shape)}"


def size(num_bytes: float) -> str:
    """Format a number of bytes: `4.0 kB`, `102 MB`, `1.2 GB`."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while num_bytes >= 999.5 and unit != "TB":
        num_bytes, unit = num_bytes / 1000, next(units)
    return f"{num_bytes:.1f} {unit}" if num_bytes < 10 and unit != "B" else f"{num_bytes:.0f} {unit}"


def speed(images_per_second: float) -> str:
    """Format a number of images per second: `1,234` or `0.32`."""
    return f"{images_per_second:,.0f}" if images_per_second >= 9.95 else f"{images_per_second:.2g}"


def duration(seconds: float | None) -> str:
    """Format seconds: `8.2 s`, `3 min 20 s`, `2 h 05 min`; `-` if they are unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def is_share(metric: str) -> bool:
    """Return whether a metric, such as "top1" or "val_ema top1", is a fraction. Fractions are shown in percent."""
    return _SHARES.fullmatch(metric.rpartition(" ")[2]) is not None


def figure(metric: str, value: float) -> str:
    """Format a metric's value with its significant digits: `85.21%`, `0.4312`, `1.25e-06`."""
    if is_share(metric):
        return f"{value:.2%}"
    return f"{value:,.0f}" if metric == "count" else decimal(value)


def decimal(value: float) -> str:
    """Format a number with four decimals, or with four significant digits if it is very small or large."""
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 else f"{value:.4g}"


def choices(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'? there are: w, x, y`, for a short list of names."""
    known = sorted(known)
    return f"{nearest(name, known)} there are: {', '.join(known)}".lstrip(", ")


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in ("Cf", "Cc") or _HIDDEN.match(char) is not None


def _compatible(char: str) -> str:
    kind = unicodedata.decomposition(char).partition(" ")[0]
    return unicodedata.normalize("NFKC", char) if kind.startswith("<") and kind not in _DIFFERENT else char


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
