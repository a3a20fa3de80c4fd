"""Errors that a user can act on: one line with the place, the value and what to do."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxddp.core.message import Key, Words, flat, parts_of, plain, text_of
from jaxddp.core.wording import in_short, kind_of, on_screen

THEN = "then"
"""Prefix of notes on an error about further errors that it caused. The command line shows them."""


class JaxddpError(Exception):
    """Base class of the errors that the command line shows as one line. The process ends with `exit_code`.

    The message can contain text from files, variables and other machines, so it is escaped by `on_screen`. Pickling
    keeps the message, but not the fields.

    Attributes:
        about: what the error is about, the outermost first: a file, an object, a key.
        problem: what is wrong, as parts of a message.
        advice: what to do, as parts of a message.
    """

    exit_code = 1

    def __init__(self, *problem: Words, advice: Words = ()):
        self.about: tuple[tuple[str | Key, ...], ...] = ()
        self.problem, self.advice = flat(problem), flat(advice)
        super().__init__(self._line())

    @property
    def key(self) -> str | None:
        """The first key in the message; None if there is none."""
        return self._first.name if self._first else None

    @property
    def value(self) -> Any:
        """The value of that key; None if the message has none."""
        return self._first.value if self._first and self._first.has_value else None

    def within(self, where: Words | object) -> "JaxddpError":
        """Return the same error with `where` before its message."""
        error = type(self)(*self.problem, advice=self.advice)
        error.about = (flat(where), *self.about)
        error.args = (error._line(),)
        return error

    def tell(self, words: Callable[[Key], str]) -> None:
        """Rename the keys in the message, for example to options. Keys that were renamed before do not change."""
        self.change_keys(lambda key: replace(key, rendered=words(key)))

    def to_json(self) -> str:
        """Return the error as JSON for other processes; see `error_from`."""
        return json.dumps([[*map(plain, self.about)], plain(self.problem), plain(self.advice)])

    def change_keys(self, change: Callable[[Key], Key]) -> None:
        """Replace the keys in the message, except those that are renamed already."""

        def changed(parts: tuple[str | Key, ...]) -> tuple[str | Key, ...]:
            return tuple(change(part) if isinstance(part, Key) and part.rendered is None else part for part in parts)

        self.about = tuple(map(changed, self.about))
        self.problem, self.advice = changed(self.problem), changed(self.advice)
        self.args = (self._line(),)

    def __reduce__(self) -> tuple[Any, ...]:
        # Values of keys may not be picklable.
        return type(self), self.args, {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None

    @property
    def _first(self) -> Key | None:
        parts = (part for each in (*self.about, self.problem, self.advice) for part in each)
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
    """The loss or the state is no longer finite. Such a state is never saved."""


class ReplicaError(JaxddpError):
    """The devices have different states. None of them is saved."""


class GradientError(JaxddpError, ArithmeticError):
    """The averaged gradient differs from the gradient that one device computes."""


class Preempted(JaxddpError):
    """The scheduler ended the run. Its state was saved, and a later start resumes it."""

    exit_code = 75


class Answered(SystemExit):
    """The user requested help, which was printed."""


def refused(name: str, value: object, advice: str) -> InputError:
    """Return the error for a wrong argument: `k='5': give …`, or `model: an object of type int was given; give …`."""
    shown = in_short(value)
    if shown is None:
        return InputError(Key(name), f": {kind_of(value)} was given", advice=advice)
    return InputError(Key(name, value, shown), f": {advice}")


def error_of(code: int, line: str) -> JaxddpError:
    """Return the error that another process raised, by its exit code: `InputError` for 2, otherwise `Unreachable`."""
    return (InputError if code == InputError.exit_code else Unreachable)(line)


def error_from(code: int, text: str) -> JaxddpError:
    """Like `error_of`, from the JSON of `JaxddpError.to_json`, which keeps the keys."""
    about, problem, advice = json.loads(text)
    error = error_of(code, "")
    error.about, error.problem, error.advice = tuple(map(parts_of, about)), parts_of(problem), parts_of(advice)
    error.args = (error._line(),)
    return error


def with_notes(line: str, error: BaseException) -> str:
    """Return an error's line together with its notes about further errors."""
    # Only this package's notes: the notes of JAX have many lines.
    return "; ".join([line, *(note for note in getattr(error, "__notes__", ()) if note.startswith(THEN))])


@contextmanager
def about(*where: Words | object) -> Iterator[None]:
    """Put `where` before the message of an InputError or Unreachable in the block."""
    try:
        yield
    except (InputError, Unreachable) as error:
        raise error.within(where) from error


@contextmanager
def as_written() -> Iterator[None]:
    """Keep the keys of an error in the block as they are: they are keys of a file, not options or arguments."""
    try:
        yield
    except JaxddpError as error:
        error.tell(str)
        raise


@contextmanager
def noted_on(error: BaseException | None) -> Iterator[None]:
    """Add an InputError or Unreachable of the block as a note to the earlier `error`. If `error` is None, raise it."""
    try:
        yield
    except (InputError, Unreachable) as another:
        if error is None:
            raise
        # The block often closes something, such as a file, and this may raise the same error again.
        if str(another) != str(error):
            error.add_note(f"{THEN}: {another}")
