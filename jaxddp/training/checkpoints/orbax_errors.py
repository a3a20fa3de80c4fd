"""What Orbax and TensorStore raise of files, as one line that a user can act on."""

import errno
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.message import Option
from jaxddp.core.phases import committing

UNFINISHED = ".orbax-checkpoint-tmp"
"""How the names of what Orbax has not finished end, as a rule."""
# TensorStore, which writes the arrays, raises ValueError with this in its text; or, as Orbax does, where a file that it
# wrote has gone, with one of those at its beginning.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_GONE = ("NOT_FOUND: ", "No ArrayMetadata found ", "Checkpoint directory does not exist")
_UNFINISHED = re.compile(rf"(/[^\s'\"]*{UNFINISHED})")
# What Orbax and TensorStore raise of files that do not hold what they should.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError)
# Where Orbax logs what a save raises: once in each of its threads, though it raises it as well.
_RAISING_MODULES = ("future", "async_checkpointer", "checkpoint_manager")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns what they raise of files that cannot be written into one line, and keeps their threads from more."""
    _keep_threads_brief()
    with files.readable_errors(directory):
        try:
            yield
        except ValueError as error:
            if (of_file := _of_file(error)) is None:
                raise
            raise of_file from error


def _of_file(error: BaseException | None) -> OSError | None:
    """The same as an OSError, where a file is what it is about."""
    if isinstance(error, OSError):
        return error
    if not isinstance(error, ValueError):
        return None
    text = str(error)
    if found := _OS_ERROR.search(text):
        code = int(found[1])
    elif text.startswith(_GONE) or any(not os.path.exists(place) for place in _UNFINISHED.findall(text)):
        code = errno.ENOENT
    else:
        return None
    return OSError(code, os.strerror(code))


@functools.cache
def _keep_threads_brief() -> None:
    """Of a full disk, their threads print 20 tracebacks and more, and go on to do so after what waits has failed.

    So this lasts as long as the process. An error that is not about a file keeps its traceback.
    """
    logging.getLogger("absl").addFilter(_is_news)
    previous = sys.unraisablehook

    def unraisable(of: "sys.UnraisableHookArgs") -> None:
        # TensorStore finishes a write whose waiting event loop an earlier error has ended.
        if not (isinstance(of.exc_value, RuntimeError) and str(of.exc_value) == "Event loop is closed"):
            previous(of)

    sys.unraisablehook = unraisable


def _is_news(record: logging.LogRecord) -> bool:
    """Whether Orbax logs what nobody else says. What it logs of a file becomes one line."""
    error = _of_file(record.exc_info[1]) if record.exc_info else None
    if error is None:
        # A warning of a file that an unfinished step should have: what fails because of it says more.
        return record.levelno >= logging.ERROR or UNFINISHED not in record.getMessage()
    if record.module in _RAISING_MODULES:
        return False
    record.msg, record.args = f"{record.getMessage()}: {error.strerror or type(error).__name__}", ()
    record.exc_info = None
    return True


class Wait(Protocol):
    """Waits until all processes have come to the same key. Raises: where they have not in so many milliseconds."""

    def __call__(self, *, key: str, timeout_ms: int) -> None: ...


class Barrier:
    """Where Orbax's threads wait for the other processes; one whose part of a save has failed does not.

    On its way out of such a save Orbax waits at another barrier than the others, who wait for this part: all would
    stand for `AsyncOptions.timeout_secs`, and nobody would hear why. So the error goes on to where it can be said.
    """

    def __init__(self, wait: Wait):
        self._wait = wait
        # What this thread handles may be an error of long before, after which a user trains again.
        self._training = threading.get_ident()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if threading.get_ident() != self._training and (error := sys.exception()) is not None:
            raise error
        with committing():
            self._wait(key=key, timeout_ms=timeout_ms)


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """The same for reading; and Orbax is kept from warning of a directory that it was told only to read."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with files.reading(directory, ("check ", Option("workdir"))):
            yield
    finally:
        log.setLevel(before)


@contextmanager
def restoring(directory: Path, step: int) -> Iterator[Path]:
    """Turns what they raise of a step's checkpoint, whose place it gives, into an InputError or Unreachable."""
    place = directory / str(step)
    try:
        yield place
    except InputError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # Of a wait for another process.
        if (of_file := _of_file(error)) is not None:
            files.check_server(place, of_file)
        if not place.is_dir():
            raise InputError(f"{place}: is no longer there; a run goes on, so try again") from None
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{place}: step {step} cannot be restored ({type(error).__name__}: {reason}); move it away, and the "
            "step before it is taken"
        ) from error
