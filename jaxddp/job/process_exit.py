"""Ends a process at once, after it writes a line with the reason. Also writes the stacks of its threads."""

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
    # faulthandler holds the GIL while it writes, and stderr may be a full pipe. So the stacks go to a file first.
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
        _write_in_time(lambda: sys.stderr.write(f"the stacks of all threads:\n{stacks}"))


def show_stacks_on_signal() -> None:
    """Write the stacks on SIGUSR1, even if a thread holds the GIL. A program's own handler of SIGUSR1 stays."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(OSError, ValueError):  # A notebook's stderr has no file descriptor.
            faulthandler.register(signal.SIGUSR1)


def end_now(line: str, code: int) -> None:
    """Write the last line of stderr, and end the process without running exit handlers."""
    _write_in_time(sys.stdout.flush)
    # The line is a single write, because mpirun interleaves the writes of several processes.
    _write_in_time(lambda: (sys.stderr.write(f"jaxddp: {on_screen(line)}\n"), sys.stderr.flush()))
    os._exit(code)


def _write_in_time(write: Callable[[], object]) -> None:
    """Call `write`, and wait at most a second: a pipe may be full, or another thread may hold the stream's lock."""
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITING_SECONDS)
