"""Turns the file errors of Orbax and TensorStore into one-line errors that a user can act on."""

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
"""The usual suffix of directories that Orbax has not finished."""
# TensorStore, which writes the arrays, raises a ValueError whose text contains `_OS_ERROR`. If a file that it or
# Orbax wrote is gone, the text starts with one of `_GONE`.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_GONE = ("NOT_FOUND: ", "No ArrayMetadata found ", "Checkpoint directory does not exist")
_UNFINISHED = re.compile(rf"(/[^\s'\"]*{UNFINISHED})")
# The errors of Orbax and TensorStore for damaged files.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError)
# Modules of Orbax that log an error of a save in each thread, although they also raise it.
_RAISING_MODULES = ("future", "async_checkpointer", "checkpoint_manager")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Context that turns an error in writing a file into an `InputError` of one line, and shortens Orbax's logs."""
    _keep_threads_brief()
    with files.readable_errors(directory):
        try:
            yield
        except ValueError as error:
            if (of_file := _of_file(error)) is None:
                raise
            raise of_file from error


def _of_file(error: BaseException | None) -> OSError | None:
    """Returns a file error as an OSError, and None for any other error."""
    if isinstance(error, OSError):
        return error
    if not isinstance(error, ValueError):
        return None
    text = str(error)
    if match := _OS_ERROR.search(text):
        code = int(match[1])
    elif text.startswith(_GONE) or any(not os.path.exists(place) for place in _UNFINISHED.findall(text)):
        code = errno.ENOENT
    else:
        return None
    return OSError(code, os.strerror(code))


@functools.cache
def _keep_threads_brief() -> None:
    """Shorten what Orbax's threads log about file errors, for as long as the process lives.

    With a full disk they print 20 tracebacks and more, some of them after the save has failed. An error that is not
    about a file keeps its traceback.
    """
    logging.getLogger("absl").addFilter(_shortened)
    previous = sys.unraisablehook

    def unraisable(raised: "sys.UnraisableHookArgs") -> None:
        # After an error has closed an event loop, TensorStore may still finish a write that the loop waited for. The
        # second error is not reported.
        if not (isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"):
            previous(raised)

    sys.unraisablehook = unraisable


def _shortened(record: logging.LogRecord) -> bool:
    """A log filter: shortens a record about a file error to one line, and drops records that repeat another error."""
    error = _of_file(record.exc_info[1]) if record.exc_info else None
    if error is None:
        # Drops warnings about missing files of an unfinished step: the error that they cause is clearer.
        return record.levelno >= logging.ERROR or UNFINISHED not in record.getMessage()
    if record.module in _RAISING_MODULES:
        return False
    record.msg, record.args = f"{record.getMessage()}: {error.strerror or type(error).__name__}", ()
    record.exc_info = None
    return True


class Wait(Protocol):
    """Waits until all processes wait with the same key. Raises: any error if a process does not within `timeout_ms`."""

    def __call__(self, *, key: str, timeout_ms: int) -> None: ...


class Barrier:
    """The barrier at which Orbax's threads wait for other processes. A thread whose save failed does not wait.

    After a failed save Orbax would wait at another barrier than the other processes, so all would wait for
    `AsyncOptions.timeout_secs` and the cause would not be reported. This barrier raises the error of the save instead.
    """

    def __init__(self, wait: Wait):
        self._wait = wait
        # `__call__` ignores the error that this thread handles, because it need not come from the save: a user may call
        # `train` in an `except` block.
        self._training = threading.get_ident()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if threading.get_ident() != self._training and (error := sys.exception()) is not None:
            raise error
        with committing():
            self._wait(key=key, timeout_ms=timeout_ms)


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Context that turns an error in reading a file into an `InputError` of one line, and hides Orbax's warnings."""
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
    """Context that turns errors of a step's checkpoint into InputError or Unreachable; yields the step's directory."""
    place = directory / str(step)
    try:
        yield place
    except InputError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # A wait for another process timed out.
        if (of_file := _of_file(error)) is not None:
            files.check_server(place, of_file)
        if not place.is_dir():
            raise InputError(
                f"{place}: was removed while it was read; the run is still training, so try again"
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{place}: step {step} cannot be restored ({type(error).__name__}: {reason}); move it away "
            "to use the step before"
        ) from error
