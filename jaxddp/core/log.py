"""The format of the package's log, in notebooks and in terminals.

A record of level INFO has no prefix. A warning has a prefix, like the errors of the command line.

If a program sets a format for its root logger, the log uses this format. The log does not use the default format of
`logging.basicConfig()`, such as `WARNING:jaxddp.experiment:`, because absl calls that function. Orbax logs with absl.
"""

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

from jaxddp.core.errors import on_screen
from jaxddp.core.phases import hidden

_PACKAGE = "jaxddp"


class _Lines(logging.Handler):
    """A handler that passes the package's records to the handlers of the root logger that have a format of their own.

    If there are none, it prints the records.
    """

    def emit(self, record: logging.LogRecord) -> None:
        formatting = [handler for handler in logging.root.handlers if _has_format(handler, record)]
        for handler in formatting:
            # pytest adds its own handlers to a logger that does not propagate.
            if record.levelno >= handler.level and handler not in logging.getLogger(_PACKAGE).handlers:
                handler.handle(record)
        if not formatting:
            # sys.stderr is looked up each time, because a progress display replaces it.
            with hidden():
                print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text with a prefix, `jaxddp: warning: …`. A record of level INFO has no prefix."""
        text = "\n".join(map(on_screen, super().format(record).split("\n")))
        return text if record.levelno < logging.WARNING else f"{_PACKAGE}: {record.levelname.lower()}: {text}"


def _has_format(handler: logging.Handler, record: logging.LogRecord) -> bool:
    plain = f"{record.levelname}:{record.name}:{record.getMessage()}"
    return not isinstance(handler, logging.NullHandler) and handler.format(record) != plain


def show_lines() -> None:
    """Print the package's log from level INFO. A level that the program has set does not change."""
    package = logging.getLogger(_PACKAGE)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not any(isinstance(handler, _Lines) for handler in package.handlers):
        package.addHandler(_Lines())
        package.propagate = False


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line to stderr or another stream. Escape characters that it cannot encode, and ignore a closed stream."""
    target = stream or sys.stderr
    encoding = target.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=target, flush=True)
    except OSError:
        # A full disk or a closed reader (`| head`, a closed terminal) must not end the run. The flush at exit would
        # also fail, and change the exit code, so the stream is redirected to /dev/null.
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())
