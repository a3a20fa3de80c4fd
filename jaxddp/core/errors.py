"""Errors that a user can act on, one line with the location, the value and the advice; and the words of such lines."""

import json
import math
import re
import reprlib
import sysconfig
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
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


def kind_of(value: object) -> str:
    """Describe an object by its type: `None`, `the class Net`, `an object of type int`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def not_installed(package: str, extra: str) -> str:
    """Return the message for a missing package, with the extra that installs it."""
    return f"{package} is not installed; pip install 'jaxddp[{extra}]'"


@contextmanager
def requires(where: object, package: str, extra: str) -> Iterator[None]:
    """Turn an ImportError in the block, which imports a package, into an `InputError` with the extra that installs it.

    Args:
        where: what needs the package.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise InputError(f"{where}: {not_installed(package, extra)}") from None
    except ImportError as error:
        advice = f"pip install --force-reinstall 'jaxddp[{extra}]'"
        raise InputError(f"{where}: {package} cannot be imported ({first_line(error)})", advice=advice) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which may have many lines; the error's type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def nearest(name: str, known: Iterable[str], folder: str = "") -> str:
    """Return `, did you mean 'x'?` if a known name is similar, else "". The name in the message follows `folder`."""
    known = list(known)
    twin = next((other for other in known if other != name and appearance(other) == appearance(name)), None)
    if twin is not None and not (name + twin).isascii():
        points_of_twin, points = code_points(twin, name)
        return f", did you mean {twin!r} ({points_of_twin}, where this is {points})?"
    # Matching takes quadratic time, and every known name is shorter than the limit.
    close = get_close_matches(name, known, n=1) if len(name) <= _LONGEST else []
    return f", did you mean {folder + close[0]!r}?" if close else ""


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
        before, after = "…" if first else "", "…" if len(text) > first + _POINTS else ""
        return f"{before}{points}{after}"

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


def listed(names: Iterable[str], between: str = ", ", most: int = 6) -> str:
    """List the first `most` names, and the number of the others: `cat, dog and 4 more`."""
    names = list(names)
    return between.join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


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


def measure(metric: str, value: float | str) -> str:
    """Return a metric with its value, or with a text in its place: `top-1 85.21%`."""
    return f"{metric_name(metric)} {value if isinstance(value, str) else figure(metric, value)}"


def metric_name(metric: str) -> str:
    """Return the name of a metric as text: `top-1` for "top1"."""
    return re.sub(r"\btop(?=[0-9]+$)", "top-", metric)


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


_ABSENT = object()


@dataclass(frozen=True)
class Key:
    """A key of a config, such as "train.batch_size", or another name in a message.

    Attributes:
        value: the value in the message, if the message has a value.
        shown: the text of the value; None for its `repr`.
        rendered: the text that replaces the name and the value, such as an option; None until the key is translated
            for the command line or the Python API.
    """

    name: str
    value: Any = _ABSENT
    shown: str | None = None
    rendered: str | None = None

    @classmethod
    def plain(cls, name: str, value: Any) -> "Key":
        """Return a key whose value has no quotes in the message."""
        return cls(name, value, str(value))

    def to_plain(self) -> list[Any]:
        """Return the arguments of the key as JSON types. A value of another type is replaced by its text."""
        if not self.has_value:
            return [type(self).__name__, self.name]
        is_json = self.value is None or isinstance(self.value, str | int | float)
        return [type(self).__name__, self.name, self.value if is_json else self.shown_value, self.shown_value]

    @property
    def has_value(self) -> bool:
        """Whether the message shows a value."""
        return self.value is not _ABSENT

    @property
    def shown_value(self) -> str:
        """The text of the value in the message."""
        return show(self.value) if self.shown is None else self.shown

    def __str__(self) -> str:
        return self._text() if self.rendered is None else self.rendered

    def _text(self) -> str:
        return f"{self.name}={self.shown_value}" if self.has_value else self.name


class Option(Key):
    """A key in the form of a command-line option, for advice: `--train.accumulate 4`."""

    def _text(self) -> str:
        return f"{format_option(self.name)} {self.value}" if self.has_value else format_option(self.name)


Words = str | Key | tuple["Words", ...]
"""A part of a message: text, a key, or a tuple of parts."""


def joined(between: str, words: Iterable[Words]) -> tuple[Words, ...]:
    """Return the parts with the text `between` between every two of them."""
    return tuple(part for each in words for part in (between, each))[1:]


def format_option(key: str) -> str:
    """Return the option of a key: "--train.batch-size"."""
    return "--" + key.replace("_", "-")


def key_of_option(word: str) -> str:
    """Return the key of an option such as "--train.batch-size=8"; an empty string for a word that is no option."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def flat(words: Any) -> tuple[str | Key, ...]:
    """Flatten nested parts to a tuple. Objects other than keys are converted to text."""
    if isinstance(words, tuple):
        return tuple(part for each in words for part in flat(each))
    return (words if isinstance(words, Key) else str(words),)


def text_of(words: Words) -> str:
    """Return the text of a message."""
    return "".join(map(str, flat(words)))


_PACKAGE = Path(__file__).parent.parent
_NOT_USER_CODE = (_PACKAGE, _PACKAGE.parent / "configs", Path(sysconfig.get_path("stdlib")))
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
THEN = "then"
"""Prefix of a note on an exception about a further error that it caused. The command line shows these notes."""


class JaxddpError(Exception):
    """Base class of the errors that the command line shows as one line. The process ends with `exit_code`.

    The message can contain text from files, variables and other machines, so it is escaped by `on_screen`. Pickling
    keeps the message, but not the attributes.

    Attributes:
        problem: the locations of the error, the outermost first, and the description of the fault, as parts of a
            message.
        advice: the advice to the user, as parts of a message.
    """

    exit_code = 1

    def __init__(self, *problem: Words, advice: Words = ()):
        self.problem, self.advice = flat(problem), flat(advice)
        super().__init__(self._line())

    @property
    def key(self) -> str | None:
        """The name of the first key in the message; None if there is no key."""
        return self._first_key.name if self._first_key else None

    @property
    def value(self) -> Any:
        """The value of the first key in the message; None if there is no value."""
        return self._first_key.value if self._first_key and self._first_key.has_value else None

    def within(self, where: Words | object) -> "JaxddpError":
        """Return a copy of the error with `where` before its message."""
        return type(self)(*flat(where), ": ", *self.problem, advice=self.advice)

    def rename_keys(self, new_name: Callable[[Key], str]) -> None:
        """Rename the keys in the message, for example to options. Keys that are already renamed do not change."""
        self.change_keys(lambda key: replace(key, rendered=new_name(key)))

    def to_json(self) -> str:
        """Return the error as JSON for other processes; see `error_from`."""
        # A key that is already renamed becomes text.
        parts = self.problem, self.advice
        return json.dumps(parts, default=lambda key: key.to_plain() if key.rendered is None else str(key))

    def change_keys(self, change: Callable[[Key], Key]) -> None:
        """Replace the keys in the message, except keys that are already renamed."""

        def change_parts(parts: tuple[str | Key, ...]) -> tuple[str | Key, ...]:
            return tuple(change(part) if isinstance(part, Key) and part.rendered is None else part for part in parts)

        self.problem, self.advice = change_parts(self.problem), change_parts(self.advice)
        self.args = (self._line(),)

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython and notebooks show: the frames of the user's code, and the message."""
        frames = [frame for error in chain(self) for frame in traceback.extract_tb(error.__traceback__)]
        own = traceback.format_list([frame for frame in frames if is_user_code(frame.filename)])
        return [*own, f"{type(self).__name__}: {with_notes(str(self), self)}"]

    def __reduce__(self) -> tuple[Any, ...]:
        # Values of keys may not be picklable.
        return type(self), self.args, {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None

    @property
    def _first_key(self) -> Key | None:
        return next((part for part in (*self.problem, *self.advice) if isinstance(part, Key)), None)

    def _line(self) -> str:
        text = text_of(self.problem) + (f"; {text_of(self.advice)}" if self.advice else "")
        return on_screen(" ".join(text.split()))


class InputError(JaxddpError, ValueError):
    """A file, key or argument that the user must change: `train.csv:7: empty ImageId; give every row an id`."""

    exit_code = 2


class Unreachable(JaxddpError):
    """A store, a disk or a process did not answer in time. The user made no mistake, and trying again may help."""


class NonFiniteError(JaxddpError, ArithmeticError):
    """The loss or the state is not finite. A state that is not finite is never saved."""


class ReplicaError(JaxddpError):
    """The devices have different states. No state is saved."""


class GradientError(JaxddpError, ArithmeticError):
    """The averaged gradient differs from the gradient that one device computes."""


class Preempted(JaxddpError):
    """The run was asked to stop. Its state was saved, and a later start resumes it."""

    exit_code = 75


class HelpPrinted(SystemExit):
    """The user requested help, and the help was printed."""


def refused(name: str, value: object, advice: str) -> InputError:
    """Return the error for a wrong argument: `k='5': give …`, or `model: an object of type int was given; give …`."""
    if type(value) not in _PLAIN:
        return InputError(Key(name), f": {kind_of(value)} was given", advice=advice)
    return InputError(Key(name, value, _cut(_shortened.repr(value))), f": {advice}")


def error_of(code: int, *problem: Words, advice: Words = ()) -> JaxddpError:
    """Return the error of another process, by its exit code: `InputError` for 2, otherwise `Unreachable`."""
    return (InputError if code == InputError.exit_code else Unreachable)(*problem, advice=advice)


def error_from(code: int, text: str) -> JaxddpError:
    """Return the error of another process from the JSON of `JaxddpError.to_json`, with its keys; see `error_of`."""
    kinds = {"Key": Key, "Option": Option}

    def parts_of(plain: list[Any]) -> tuple[str | Key, ...]:
        return tuple(part if isinstance(part, str) else kinds[part[0]](*part[1:]) for part in plain)

    problem, advice = map(parts_of, json.loads(text))
    return error_of(code, *problem, advice=advice)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and the errors that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def is_user_code(file: str) -> bool:
    """Return whether the file of a frame belongs neither to this package, nor to a library or Python itself."""
    # Other names in brackets are not the user's files: <frozen runpy>, and <string> for a method of a dataclass.
    if file.startswith("<"):
        return file.startswith("<ipython-input")
    path = Path(file).absolute()
    return not (_LIBRARIES & {*path.parts} or any(map(path.is_relative_to, _NOT_USER_CODE)))


def with_notes(line: str, error: BaseException) -> str:
    """Return the line of an error, followed by its notes about further errors."""
    # Only this package's notes are included, because JAX's notes have many lines.
    return "; ".join([line, *(note for note in getattr(error, "__notes__", ()) if note.startswith(THEN))])


@contextmanager
def about(*where: Words | object) -> Iterator[None]:
    """Put `where` before the message of an InputError or Unreachable that the block raises."""
    try:
        yield
    except (InputError, Unreachable) as error:
        raise error.within(where) from error


@contextmanager
def with_keys_of_file() -> Iterator[None]:
    """Mark the keys in an error of the block as keys of a file. They are not renamed to options or arguments later."""
    try:
        yield
    except JaxddpError as error:
        error.rename_keys(str)
        raise


@contextmanager
def added_as_note_to(error: BaseException | None) -> Iterator[None]:
    """Add an InputError or Unreachable of the block as a note to `error`. If `error` is None, raise the new error."""
    try:
        yield
    except (InputError, Unreachable) as new_error:
        if error is None:
            raise
        # The block often closes a file or a connection, which may raise the same error again.
        if str(new_error) != str(error):
            error.add_note(f"{THEN}: {new_error}")
