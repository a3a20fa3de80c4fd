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
from jaxddp.core.errors import InputError, Option
from jaxddp.core.phases import committing

UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
"""The usual suffix of directories that Orbax has not finished."""
# TensorStore, which writes the arrays, raises a ValueError whose text contains `_OS_ERROR`. If a file that it or
# Orbax wrote is gone, the text starts with one of `_GONE`.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_GONE = ("NOT_FOUND: ", "No ArrayMetadata found ", "Checkpoint directory does not exist")
_UNFINISHED = re.compile(rf"(/[^\s'\"]*{UNFINISHED_SUFFIX})")
# The errors of Orbax and TensorStore for damaged files.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError)
# Modules of Orbax that both log and raise the error of a failed save, in each thread.
_RAISING_MODULES = ("future", "async_checkpointer", "checkpoint_manager")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an error in writing a file in the block into an `InputError` of one line, and shorten Orbax's logs."""
    _shorten_thread_logs()
    with files.readable_errors(directory):
        try:
            yield
        except ValueError as error:
            if (file_error := _file_error(error)) is None:
                raise
            raise file_error from error


def _file_error(error: BaseException | None) -> OSError | None:
    """Return a file error as an OSError; None for any other error."""
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
def _shorten_thread_logs() -> None:
    """Shorten the log records of Orbax's threads about file errors, until the process ends.

    On a full disk, the threads log 20 or more tracebacks, some of them after the save has failed. An error that is not
    about a file keeps its traceback.
    """
    logging.getLogger("absl").addFilter(_shorten_record)
    previous = sys.unraisablehook

    def unraisable(raised: "sys.UnraisableHookArgs") -> None:
        # After an error has closed an event loop, TensorStore may still finish a write that the loop waited for. Do
        # not report the error that follows.
        if not (isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"):
            previous(raised)

    sys.unraisablehook = unraisable


def _shorten_record(record: logging.LogRecord) -> bool:
    """Shorten a log record about a file error to one line. Returns False for a record that repeats an error."""
    error = _file_error(record.exc_info[1]) if record.exc_info else None
    if error is None:
        # Drop warnings about missing files of an unfinished step: the error that follows is clearer.
        return record.levelno >= logging.ERROR or UNFINISHED_SUFFIX not in record.getMessage()
    if record.module in _RAISING_MODULES:
        return False
    record.msg, record.args = f"{record.getMessage()}: {error.strerror or type(error).__name__}", ()
    record.exc_info = None
    return True


class Wait(Protocol):
    """A function that waits until all processes wait with the same key. Raises: an error after `timeout_ms`."""

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
    """Turn an error in reading a file in the block into an `InputError` of one line, and hide Orbax's warnings."""
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
    """Turn errors of a step's checkpoint in the block into InputError or Unreachable. Yields the step's directory."""
    place = directory / str(step)
    try:
        yield place
    except InputError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # A wait for another process timed out.
        if (file_error := _file_error(error)) is not None:
            files.check_server(place, file_error)
        if not place.is_dir():
            raise InputError(
                f"{place}: was removed while it was read; the run is still training, so try again"
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{place}: step {step} cannot be restored ({type(error).__name__}: {reason}); move it away "
            "to use the step before"
        ) from error
