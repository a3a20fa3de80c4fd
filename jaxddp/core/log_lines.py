"""The format of the package's log, in notebooks and in terminals.

A record of level INFO has no prefix. A warning has a prefix, like the errors of the command line.

If a program sets a format for its root logger, the log uses this format. The log does not use the default format of
`logging.basicConfig()`, such as `WARNING:jaxddp.experiment:`, because absl calls that function. Orbax logs with absl.
"""

import logging
import sys

from jaxddp.core.phases import hidden
from jaxddp.core.wording import on_screen

_NAME = "jaxddp"


class _Lines(logging.Handler):
    """A handler that prints the package's records, if no handler of the root logger has a format of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        formatted = [_has_format(handler, record) for handler in logging.root.handlers]
        for handler, has_format in zip(logging.root.handlers, formatted, strict=True):
            if not has_format and not any(isinstance(known, _RecordFilter) for known in handler.filters):
                handler.addFilter(_RecordFilter(handler))
        if not any(formatted):
            # sys.stderr is looked up each time, because a progress display replaces it.
            with hidden():
                print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text with a prefix, `jaxddp: warning: …`. A record of level INFO has no prefix."""
        text = "\n".join(map(on_screen, super().format(record).split("\n")))
        return text if record.levelno < logging.WARNING else f"{_NAME}: {record.levelname.lower()}: {text}"


class _RecordFilter(logging.Filter):
    """A filter that passes the records of other packages. If the handler has its own format, it passes all records."""

    def __init__(self, handler: logging.Handler):
        super().__init__()
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] != _NAME or _has_format(self._handler, record)


def _has_format(handler: logging.Handler, record: logging.LogRecord) -> bool:
    plain = f"{record.levelname}:{record.name}:{record.getMessage()}"
    return not isinstance(handler, logging.NullHandler) and handler.format(record) != plain


def show_lines() -> None:
    """Print the package's log from level INFO. A level that the program has set does not change."""
    package = logging.getLogger(_NAME)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not any(isinstance(handler, _Lines) for handler in package.handlers):
        package.addHandler(_Lines())
