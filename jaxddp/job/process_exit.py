"""How a process ends at once: with the stacks of its threads, if they help, and one line that says why."""

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
    # By way of a file: what writes them holds Python's lock, and stderr may be a pipe that nobody empties.
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
        _in_time(lambda: sys.stderr.write(f"the stacks of all threads:\n{stacks}"))


def show_stacks_on_signal() -> None:
    """SIGUSR1 shows the stacks, unless the program has a use of its own for it; also where Python's lock is held."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(OSError, ValueError):  # Of a notebook's stderr, which is no file.
            faulthandler.register(signal.SIGUSR1)


def end_now(line: str, code: int) -> None:
    """Write the line as the last of stderr, and end the process without running exit handlers."""
    _in_time(sys.stdout.flush)
    # In one piece: mpirun mixes what several processes write.
    _in_time(lambda: (sys.stderr.write(f"jaxddp: {on_screen(line)}\n"), sys.stderr.flush()))
    os._exit(code)


def _in_time(write: Callable[[], object]) -> None:
    """Write, but do not wait for a reader that does not read, nor for a thread that does."""
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITING_SECONDS)
