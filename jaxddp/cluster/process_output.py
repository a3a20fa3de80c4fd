"""The output of a process: whole lines for the screen, every byte for its log file, the last lines for a report."""

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
_OF_JAX, _STATUS = "JAX distributed service detected fatal errors", "absl::Status: "
"""In the line that it logs, behind which a stack of C++ follows."""


class Lines:
    """Divides a stream of bytes into lines, as a terminal shows them.

    A carriage return starts its line again: of the updates of a progress bar, each of which overwrites the last, only
    what a terminal shows in the end is returned. A line that does not end is returned in pieces of 64 KiB.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_overwritten(line) for line in whole]
        # Only the next byte tells whether a last "\r" is part of "\r\n".
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
        """The rest, which no newline ended."""
        rest, self._rest = self._rest, b""
        return [_overwritten(rest)] if rest else []


def _overwritten(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Output:
    """The standard output and error of one process, copied from a pipe to the screen and to the file at `path`.

    `ended` is true once no process holds the other end of the pipe; `last_lines` are ten, each with its prefix.
    `word_of_jax` is why JAX's coordination service ends the process, as it says itself before it aborts it; or empty.
    """

    def __init__(self, rank: int, pipe: IO[bytes], path: Path):
        os.set_blocking(pipe.fileno(), False)
        self.path, self.ended = path, False
        self._rank, self._pipe, self._log = rank, pipe, _open_log(path)
        self._lines, self.last_lines = Lines(), deque[str](maxlen=_LAST_LINES)
        self.word_of_jax = ""

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> bool:
        """Copy what is available, at most 64 KiB. False where there is nothing, for now or for good (`ended`)."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self.ended = not data
        self._keep(data)
        self._show(self._lines.feed(data))
        return bool(data)

    def drain(self, seconds: float) -> None:
        """Copy what a process left when it ended; bounded, because one of its children may still write."""
        give_up = time.monotonic() + seconds
        while self.read() and time.monotonic() < give_up:
            pass

    def close(self) -> None:
        """Show the rest of the last line, and close pipe and file."""
        self.ended = True
        self._show(self._lines.finish())
        self._pipe.close()
        with contextlib.suppress(OSError):
            self._log.close()

    def _keep(self, data: bytes) -> None:
        try:
            self._log.write(data)
        except OSError as error:
            say(f"jaxddp launch: {self.path}: cannot be written ({error.strerror}); the run continues without it")
            self._log = open(os.devnull, "wb")  # noqa: SIM115

    def _show(self, lines: list[str]) -> None:
        prefixed = [f"[{self._rank}] {line}" for line in lines]
        self.last_lines.extend(prefixed)
        for line in lines:
            if _OF_JAX in line:
                self.word_of_jax = line.partition(_STATUS)[2].strip()
        if prefixed:
            say("\n".join(prefixed), sys.stdout)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line to stderr or another stream, whatever its encoding, and even if its reader has gone."""
    target = stream or sys.stderr
    encoding = target.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=target, flush=True)
    except OSError:
        # A reader that has gone (`| head`, a closed terminal) must not end the run. The stream would be flushed again
        # at exit and change the exit code, so from now on it goes to /dev/null.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run appends to its log, as to its other files.
        log = files.open_regular(path, "ab", buffering=0)
        if log.tell():
            log.write(f"--- started again, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another folder with --logs") from error
    return log
