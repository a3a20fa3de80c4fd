"""Ends this process: on a signal, also while it imports; after a failure; or when it makes no progress.

The last line on stderr has the reason. A process that is stuck writes the stacks of its threads, too.
"""

import contextlib
import faulthandler
import functools
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import jaxddp.core.phases as phases
from jaxddp.core.errors import on_screen

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a program that Ctrl-C ends."""
STALL_ADVICE = "if it takes that long, raise parallel.stall_timeout"
_WRITING_SECONDS, _BEAT_SECONDS = 1.0, 1.0

_stall = math.inf
"""The limit of `watch_alone`."""


class StopRequested(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived outside training. The process cleans up as after Ctrl-C, and has nothing to save."""


@contextlib.contextmanager
def stopping_on_signals(end: Callable[[KeyboardInterrupt], int], *, is_program: bool) -> Iterator[None]:
    """Raise `StopRequested` on SIGTERM in the block. SIGHUP, of a closed terminal, becomes SIGTERM.

    An error that follows a signal is a consequence of it: C++ code turns a KeyboardInterrupt into another error. During
    an import, SIGTERM and Ctrl-C end the process at once, because some libraries hide errors of their imports, and
    Python itself discards an error in the lock of an import. Handlers that a program has set do not change.

    Args:
        end: writes the last line of a process that ends at once, and returns its exit code.
        is_program: whether the process ends after the block. It then keeps its exit code after a later SIGTERM.
    """
    requests = list[KeyboardInterrupt]()

    def stop(number: int, frame: FrameType | None) -> None:
        requests.append(KeyboardInterrupt() if number == signal.SIGINT else StopRequested())
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        if frame is None:
            raise requests[-1]
        # The standard error of the import may be redirected.
        sys.stderr = sys.__stderr__ or sys.stderr
        exit_at_once(end(requests[-1]))

    changed = dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number, default, handler in (
            (signal.SIGINT, signal.default_int_handler, stop),
            (signal.SIGTERM, signal.SIG_DFL, stop),
            (signal.SIGHUP, signal.SIG_DFL, lambda *_: os.kill(os.getpid(), signal.SIGTERM)),
        ):
            if signal.getsignal(number) == default:
                changed[number] = signal.SIG_IGN if is_program and number != signal.SIGINT else default
                signal.signal(number, handler)
    try:
        yield
    except Exception as error:
        if requests:
            raise requests[-1] from error
        raise
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def exit_at_once(code: int) -> NoReturn:
    """End the process without running exit handlers: by SIGINT if the code is `INTERRUPTED`.

    After another end, a loop of the shell goes on with its next command.
    """
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # It does not end the first process of a container.
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


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
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # A daemon's or notebook's stderr is no file.
            faulthandler.register(signal.SIGUSR1)


def end_now(line: str, code: int) -> None:
    """Write the last line of stderr, if it is open, and end the process without running exit handlers."""
    # `print` does nothing if the process has no standard output.
    _write_in_time(lambda: print(end="", flush=True))
    # The line is a single write, because mpirun interleaves the writes of several processes.
    _write_in_time(lambda: (sys.stderr.write(f"jaxddp: {on_screen(line)}\n"), sys.stderr.flush()))
    os._exit(code)


def _write_in_time(write: Callable[[], object]) -> None:
    """Call `write`, and wait at most a second: a pipe may be full, or another thread may hold the stream's lock."""
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITING_SECONDS)


def watch_alone(stall: float) -> None:
    """Watch a process outside a job: end this process when it makes no progress for `stall` seconds.

    After several calls, the last value of `stall` applies: infinity when the watchdog of a job replaces this one.
    """
    global _stall
    _stall = stall
    _start_watching()


@functools.cache
def _start_watching() -> None:
    threading.Thread(target=_watch, name="jaxddp-watchdog", daemon=True).start()


def _watch() -> None:
    while True:
        stall = _stall
        begin, interval = time.monotonic(), min(_BEAT_SECONDS, stall / 4)
        time.sleep(interval)
        phases.subtract_idle(time.monotonic() - begin - interval)
        progress = phases.progress()
        if phases.stuck({0: progress}, stall) is not None:
            show_stacks()
            end_now(f"this process {progress}; the stacks of its threads are above; {STALL_ADVICE}", 1)
