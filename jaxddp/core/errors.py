"""Errors that a user can act on: one line with the location, the value and the advice."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxddp.core.wording import in_short, kind_of, on_screen, show

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
        if self.rendered is not None:
            return self.rendered
        return f"{self.name}={self.shown_value}" if self.has_value else self.name


class Option(Key):
    """A key in the form of a command-line option, for advice: `--train.accumulate 4`."""

    def __str__(self) -> str:
        if self.rendered is not None:
            return self.rendered
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


THEN = "then"
"""Prefix of a note on an exception about a further error that it caused. The command line shows these notes."""


class JaxddpError(Exception):
    """Base class of the errors that the command line shows as one line. The process ends with `exit_code`.

    The message can contain text from files, variables and other machines, so it is escaped by `on_screen`. Pickling
    keeps the message, but not the attributes.

    Attributes:
        about: the locations of the error, the outermost first: a file, an object, a key.
        problem: the description of the fault, as parts of a message.
        advice: the advice to the user, as parts of a message.
    """

    exit_code = 1

    def __init__(self, *problem: Words, advice: Words = ()):
        self.about: tuple[tuple[str | Key, ...], ...] = ()
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
        error = type(self)(*self.problem, advice=self.advice)
        error.about = (flat(where), *self.about)
        error.args = (error._line(),)
        return error

    def rename_keys(self, new_name: Callable[[Key], str]) -> None:
        """Rename the keys in the message, for example to options. Keys that are already renamed do not change."""
        self.change_keys(lambda key: replace(key, rendered=new_name(key)))

    def to_json(self) -> str:
        """Return the error as JSON for other processes; see `error_from`."""
        # A key that is already renamed becomes text.
        parts = self.about, self.problem, self.advice
        return json.dumps(parts, default=lambda key: key.to_plain() if key.rendered is None else str(key))

    def change_keys(self, change: Callable[[Key], Key]) -> None:
        """Replace the keys in the message, except keys that are already renamed."""

        def change_parts(parts: tuple[str | Key, ...]) -> tuple[str | Key, ...]:
            return tuple(change(part) if isinstance(part, Key) and part.rendered is None else part for part in parts)

        self.about = tuple(map(change_parts, self.about))
        self.problem, self.advice = change_parts(self.problem), change_parts(self.advice)
        self.args = (self._line(),)

    def __reduce__(self) -> tuple[Any, ...]:
        # Values of keys may not be picklable.
        return type(self), self.args, {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None

    @property
    def _first_key(self) -> Key | None:
        parts = (part for message in (*self.about, self.problem, self.advice) for part in message)
        return next((part for part in parts if isinstance(part, Key)), None)

    def _line(self) -> str:
        text = "".join([*(f"{text_of(where)}: " for where in self.about), text_of(self.problem)])
        text += f"; {text_of(self.advice)}" if self.advice else ""
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
    """The scheduler ended the run. Its state was saved, and a later start resumes it."""

    exit_code = 75


class HelpPrinted(SystemExit):
    """The user requested help, and the help was printed."""


def refused(name: str, value: object, advice: str) -> InputError:
    """Return the error for a wrong argument: `k='5': give …`, or `model: an object of type int was given; give …`."""
    shown = in_short(value)
    if shown is None:
        return InputError(Key(name), f": {kind_of(value)} was given", advice=advice)
    return InputError(Key(name, value, shown), f": {advice}")


def error_of(code: int, line: str) -> JaxddpError:
    """Return the error of another process, by its exit code: `InputError` for 2, otherwise `Unreachable`."""
    return (InputError if code == InputError.exit_code else Unreachable)(line)


def error_from(code: int, text: str) -> JaxddpError:
    """Return the error of another process from the JSON of `JaxddpError.to_json`, with its keys; see `error_of`."""
    error, (where, *rest) = error_of(code, ""), json.loads(text)

    def parts_of(plain: list[Any]) -> tuple[str | Key, ...]:
        kinds = {"Key": Key, "Option": Option}
        return tuple(part if isinstance(part, str) else kinds[part[0]](*part[1:]) for part in plain)

    error.about, (error.problem, error.advice) = tuple(map(parts_of, where)), map(parts_of, rest)
    error.args = (error._line(),)
    return error


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
