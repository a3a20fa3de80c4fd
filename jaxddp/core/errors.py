"""Errors that a user can act on: one line that says where, what value, and what was expected."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxddp.core.message import Key, Words, flat, parts_of, plain, text_of
from jaxddp.core.wording import in_short, kind_of, on_screen

THEN = "then"
"""How the notes begin that the terminal shows behind an error: what else went wrong because of it."""


class JaxddpError(Exception):
    """Base of the errors that the terminal shows as one line; the process ends with `exit_code`.

    A message may hold what files, variables and other machines say: it is kept as `on_screen` shows it. It is pickled
    as the line that it is, without its fields.

    Attributes:
        about: what it is about, the outermost first: a file, an object, a key.
        problem: what is wrong, in parts.
        advice: what to do, in parts.
    """

    exit_code = 1

    def __init__(self, *problem: Words, advice: Words = ()):
        self.about: tuple[tuple[str | Key, ...], ...] = ()
        self.problem, self.advice = flat(problem), flat(advice)
        super().__init__(self._line())

    @property
    def key(self) -> str | None:
        """The key that it is about, which is the first; None where it names none."""
        return self._first.name if self._first else None

    @property
    def value(self) -> Any:
        """What that key is given; None where the message says no value."""
        return self._first.value if self._first and self._first.has_value else None

    def within(self, where: Words | object) -> "JaxddpError":
        """The same error, of something that is about `where`."""
        error = type(self)(*self.problem, advice=self.advice)
        error.about = (flat(where), *self.about)
        error.args = (error._line(),)
        return error

    def tell(self, words: Callable[[Key], str]) -> None:
        """Say its keys in the `words` of a door; those that a door within has told stay as they are."""
        self.change_keys(lambda key: replace(key, told=words(key)))

    def to_json(self) -> str:
        """What other processes are told of it; see `error_from`."""
        return json.dumps([[*map(plain, self.about)], plain(self.problem), plain(self.advice)])

    def change_keys(self, change: Callable[[Key], Key]) -> None:
        """Put others in the place of its keys, but for those that a door has told."""

        def changed(parts: tuple[str | Key, ...]) -> tuple[str | Key, ...]:
            return tuple(change(part) if isinstance(part, Key) and part.told is None else part for part in parts)

        self.about = tuple(map(changed, self.about))
        self.problem, self.advice = changed(self.problem), changed(self.advice)
        self.args = (self._line(),)

    def __reduce__(self) -> tuple[Any, ...]:
        # The values of keys may be anything.
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
    """A store, a disk or a process gave no answer, or none in time: nothing is wrong that the user wrote, and trying
    again may help.
    """


class NonFiniteError(JaxddpError, ArithmeticError):
    """The loss or the state stopped being finite; the state that holds it is never saved."""


class ReplicaError(JaxddpError):
    """The devices hold different states, of which at most one is right; nothing of them is saved."""


class GradientError(JaxddpError, ArithmeticError):
    """The gradient that the devices average is not the one that a device computes by itself."""


class Preempted(JaxddpError):
    """The scheduler asked the run to end; its state was saved, and a later start resumes it."""

    exit_code = 75


class Answered(SystemExit):
    """A command line only asked for help, which was given."""


def refused(name: str, value: object, advice: str) -> InputError:
    """That an argument is of another kind: `k='5': give …`, or `model: an object of type int was given; give …`."""
    shown = in_short(value)
    if shown is None:
        return InputError(Key(name), f": {kind_of(value)} was given", advice=advice)
    return InputError(Key(name, value, shown), f": {advice}")


def error_of(code: int, line: str) -> JaxddpError:
    """What another process raised, by the exit code that it told: another start may help, unless it was a mistake."""
    return (InputError if code == InputError.exit_code else Unreachable)(line)


def error_from(code: int, told: str) -> JaxddpError:
    """As `error_of`, of what `JaxddpError.to_json` says of it: its keys are known as such here, too."""
    about, problem, advice = json.loads(told)
    error = error_of(code, "")
    error.about, error.problem, error.advice = tuple(map(parts_of, about)), parts_of(problem), parts_of(advice)
    error.args = (error._line(),)
    return error


def with_notes(line: str, error: BaseException) -> str:
    """What is said of an error, and what else went wrong because of it."""
    # Such as a checkpoint that could not be written, which ended nothing; JAX adds notes too, of many lines.
    return "; ".join([line, *(note for note in getattr(error, "__notes__", ()) if note.startswith(THEN))])


@contextmanager
def about(*where: Words | object) -> Iterator[None]:
    """An InputError or Unreachable of the block is about `where`, with which it begins."""
    try:
        yield
    except (InputError, Unreachable) as error:
        raise error.within(where) from error


@contextmanager
def as_written() -> Iterator[None]:
    """The keys of an error of the block are a file's: no door calls them what an option or an argument is called."""
    try:
        yield
    except JaxddpError as error:
        error.tell(str)
        raise


@contextmanager
def noted_on(error: BaseException | None) -> Iterator[None]:
    """An error of a file in the block becomes a note on the error that ended what came before, which it must not hide.

    Where nothing went wrong before, which is None, it is raised.
    """
    try:
        yield
    except (InputError, Unreachable) as another:
        if error is None:
            raise
        # What ended it may be raised once more as it is closed.
        if str(another) != str(error):
            error.add_note(f"{THEN}: {another}")
