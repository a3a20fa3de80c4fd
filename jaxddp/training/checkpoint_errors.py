"""What Orbax and TensorStore raise of files, as one line that a user can act on."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxddp.files as files
from jaxddp.errors import InputError

# TensorStore, which writes the arrays, raises ValueError with this in its text.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
# What Orbax and TensorStore raise of files that do not hold what they should.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError)


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns what they raise of files that cannot be written into an InputError."""
    with files.readable_errors(directory):
        try:
            yield
        except ValueError as error:
            if (code := _OS_ERROR.search(str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """The same for reading; and Orbax is kept from warning of a directory that it was told only to read."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with files.reading(directory, "check --workdir"):
            yield
    finally:
        log.setLevel(before)


@contextmanager
def restoring(directory: Path, step: int) -> Iterator[Path]:
    """Turns what they raise of a step's checkpoint, whose place it gives, into an InputError."""
    place = directory / str(step)
    try:
        yield place
    except InputError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # Of a wait for another process.
        if not place.is_dir():
            raise InputError(f"{place}: is no longer there; a run goes on, so try again") from None
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{place}: step {step} cannot be restored ({type(error).__name__}: {reason}); move it away, and the "
            "step before it is taken"
        ) from error
