"""What a process writes: whole lines for the screen, every byte for its log file, the last lines for a report."""

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, TextIO

from jaxddp.errors import InputError

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_LAST_LINES = 10


class Lines:
    """Cuts a stream of bytes into lines, as a terminal would show them.

    A carriage return begins its line again, so that of a progress bar's updates, each overwriting the last, what was to
    be seen is kept and told once. A line that does not end is told in pieces of 64 KiB.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_overwritten(line) for line in whole]
        # Whether a last "\r" ends the line together with "\n" is not known before the next byte.
        update, _, _ = rest[:-1].rpartition(b"\r")
        if update.strip():
            lines.append(_overwritten(update))
        if update:
            rest = rest[len(update) + 1 :]
        if len(rest) >= _LONGEST_LINE:
            lines.append(_overwritten(rest))
            rest = b""
        self._rest = rest
        return lines

    def finish(self) -> list[str]:
        """What has not ended in a line."""
        rest, self._rest = self._rest, b""
        return [_overwritten(rest)] if rest else []


def _overwritten(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Output:
    """One process's standard output and error, on their way from a pipe to the screen and to a file.

    Attributes:
        path: the file.
        ended: nobody holds the pipe's other end any more.
    """

    def __init__(self, rank: int, pipe: IO[bytes], path: Path):
        os.set_blocking(pipe.fileno(), False)
        self.path, self.ended = path, False
        self._rank, self._pipe, self._log = rank, pipe, _open_log(path)
        self._lines, self._last = Lines(), deque[str](maxlen=_LAST_LINES)

    def fileno(self) -> int:
        return self._pipe.fileno()

    @property
    def last_lines(self) -> list[str]:
        """The last ten lines, each with its prefix."""
        return list(self._last)

    def read(self) -> bool:
        """Pass on what there is, 64 KiB at most. False where there is nothing: just now, or for ever (`ended`)."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self.ended = not data
        self._keep(data)
        self._show(self._lines.feed(data))
        return bool(data)

    def drain(self, seconds: float) -> None:
        """Pass on what an ended process has left; the bound is for a descendant of it that goes on writing."""
        give_up = time.monotonic() + seconds
        while self.read() and time.monotonic() < give_up:
            pass

    def close(self) -> None:
        """Show what is left of the last line, and let go of pipe and file."""
        self.ended = True
        self._show(self._lines.finish())
        self._pipe.close()
        self._drop_log()

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            say(f"jaxddp launch: {self.path}: cannot be written ({error.strerror}); the run goes on without it")
            self._drop_log()

    def _drop_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def _show(self, lines: list[str]) -> None:
        prefixed = [f"[{self._rank}] {line}" for line in lines]
        self._last.extend(prefixed)
        if prefixed:
            say("\n".join(prefixed), sys.stdout)


def say(text: str, stream: TextIO | None = None) -> None:
    """A line to stderr, or to another stream, whatever its encoding, and whether or not anybody still reads it."""
    target = stream or sys.stderr
    encoding = target.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=target, flush=True)
    except OSError:
        # A reader that left (`| head`, a terminal that was closed) must not end the run. What the stream still holds
        # would be tried again at exit, and change the exit code: from here on it goes nowhere.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is resumed goes on in its log, as it does in its other files.
        log = path.open("ab", buffering=0)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another folder with --logs") from error
    if log.tell():
        log.write(f"--- started again, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    return log
