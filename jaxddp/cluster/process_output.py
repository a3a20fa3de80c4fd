"""The output of a process. The lines are printed, and the bytes are written to a log file.

The last lines are kept for the report of a failure.
"""

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, TextIO

import jaxddp.core.files as files
from jaxddp.core.errors import InputError

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_LAST_LINES = 10
_JAX_FATAL, _STATUS = "JAX distributed service detected fatal errors", "absl::Status: "
"""Text in the line that JAX logs before a C++ stack."""


class Lines:
    """The division of a stream of bytes into lines, as a terminal shows them.

    After a carriage return, a progress bar overwrites its line. Only the last update is returned, because a terminal
    would show only this update. A line without an end is returned in pieces of 64 KiB.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_overwritten(line) for line in whole]
        # A final "\r" may be the first half of "\r\n".
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
        """Return the last line, if it has no newline."""
        rest, self._rest = self._rest, b""
        return [_overwritten(rest)] if rest else []


def _overwritten(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Output:
    """The standard output and error of a process, copied from a pipe to the screen and to the file at `path`.

    Args:
        shown: whether the lines are printed on the screen.

    Attributes:
        has_ended: whether the writable end of the pipe is closed in all processes.
        last_lines: the last ten lines, with their prefix.
        jax_error: the error that JAX's coordination service logs before it aborts the process; empty without an abort.
    """

    def __init__(self, rank: int, pipe: IO[bytes], path: Path, *, shown: bool = True):
        os.set_blocking(pipe.fileno(), False)
        self.path, self.has_ended, self._shown = path, False, shown
        self._rank, self._pipe, self._log = rank, pipe, _open_log(path)
        self._lines, self.last_lines = Lines(), deque[str](maxlen=_LAST_LINES)
        self.jax_error = ""

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> bool:
        """Copy up to 64 KiB of available output. Return False if there is none yet, or if the output has ended."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self.has_ended = not data
        self._write_log(data)
        self._show(self._lines.feed(data))
        return bool(data)

    def drain(self, seconds: float) -> None:
        """Copy the last output of a process that has ended. A child process may still write, so the time is bounded."""
        deadline = time.monotonic() + seconds
        while self.read() and time.monotonic() < deadline:
            pass

    def close(self) -> None:
        """Print the unfinished last line, and close the pipe and the file."""
        self.has_ended = True
        self._show(self._lines.finish())
        self._pipe.close()
        with contextlib.suppress(OSError):
            self._log.close()

    def _write_log(self, data: bytes) -> None:
        try:
            self._log.write(data)
        except OSError as error:
            say(f"jaxddp launch: {self.path}: cannot be written ({error.strerror}); the run continues without it")
            self._log = open(os.devnull, "wb")  # noqa: SIM115

    def _show(self, lines: list[str]) -> None:
        prefixed = [f"[{self._rank}] {line}" for line in lines]
        self.last_lines.extend(prefixed)
        for line in lines:
            if _JAX_FATAL in line:
                self.jax_error = line.partition(_STATUS)[2].strip()
        if prefixed and self._shown:
            say("\n".join(prefixed), sys.stdout)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line to stderr or another stream. Replace unencodable characters, and ignore a closed stream."""
    target = stream or sys.stderr
    encoding = target.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=target, flush=True)
    except OSError:
        # A closed reader (`| head`, a closed terminal) must not end the run. The flush at exit would also fail, and
        # change the exit code, so the stream is redirected to /dev/null.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run appends to its log.
        log = files.open_regular(path, "ab", buffering=0)
        if log.tell():
            log.write(f"--- started again, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another folder with --logs") from error
    return log
