"""Ends a process at once, after a line that gives the reason; also writes the stacks of its threads."""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable

from jaxddp.core.wording import on_screen

_WRITING_SECONDS = 1.0


def show_stacks() -> None:
    """Write the stacks of all threads to stderr."""
    # faulthandler holds the GIL while it writes, and stderr may be a full pipe. So it writes to a file first.
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
        _write_in_time(lambda: sys.stderr.write(f"the stacks of all threads:\n{stacks}"))


def show_stacks_on_signal() -> None:
    """Write the stacks on SIGUSR1, even while a thread holds the GIL, unless the program uses this signal itself."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(OSError, ValueError):  # A notebook's stderr is no file.
            faulthandler.register(signal.SIGUSR1)


def end_now(line: str, code: int) -> None:
    """Write a line as the last one of stderr, and end the process without running exit handlers."""
    _write_in_time(sys.stdout.flush)
    # One write, because mpirun mixes the output of several processes.
    _write_in_time(lambda: (sys.stderr.write(f"jaxddp: {on_screen(line)}\n"), sys.stderr.flush()))
    os._exit(code)


def _write_in_time(write: Callable[[], object]) -> None:
    """Call `write`, but wait only a moment if a pipe is full, or if another thread holds the stream's lock."""
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITING_SECONDS)
