"""Errors that a user can act on: one line that says where, what value, and what was expected."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxddp.wording import on_screen

THEN = "then"
"""How the notes begin that the terminal shows behind an error: what else went wrong because of it."""


class JaxddpError(Exception):
    """Base of the errors that the terminal shows as one line; the process ends with `exit_code`.

    A message may hold what files, variables and other machines say: it is kept as `on_screen` shows it.
    """

    exit_code = 1

    def __init__(self, message: str):
        super().__init__(on_screen(" ".join(message.split())))


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


def error_of(code: int, line: str) -> JaxddpError:
    """What another process raised, by the exit code that it told: another start may help, unless it was a mistake."""
    return (InputError if code == InputError.exit_code else Unreachable)(line)


def with_notes(line: str, error: BaseException) -> str:
    """What is said of an error, and what else went wrong because of it."""
    # Such as a checkpoint that could not be written, which ended nothing; JAX adds notes too, of many lines.
    return "; ".join([line, *(note for note in getattr(error, "__notes__", ()) if note.startswith(THEN))])


@contextmanager
def about(where: object) -> Iterator[None]:
    """An InputError or Unreachable of the block begins with `where`."""
    try:
        yield
    except (InputError, Unreachable) as error:
        raise type(error)(f"{where}: {error}") from error


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
