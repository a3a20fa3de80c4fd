"""The format of the package's log, in notebooks and in terminals.

Information has no prefix. Warnings have a prefix like the command line's errors.

If a program sets a format for its root logger, that format applies. The default format of `logging.basicConfig()` does
not apply, because absl, through which Orbax logs, calls that function. Lines would then begin with
`WARNING:jaxddp.experiment:`.
"""

import logging
import sys

from jaxddp.core.wording import on_screen

_NAME = "jaxddp"


class _Lines(logging.Handler):
    """Prints the package's records, unless a handler of the root logger has a format of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        formatted = [_has_format(handler, record) for handler in logging.root.handlers]
        for handler, has_format in zip(logging.root.handlers, formatted, strict=True):
            if not has_format and not any(isinstance(one, _ForOthers) for one in handler.filters):
                handler.addFilter(_ForOthers(handler))
        if not any(formatted):
            # sys.stderr is looked up each time, because a progress display replaces it.
            print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return `jaxddp: warning: …`, or information without a prefix."""
        text = "\n".join(map(on_screen, super().format(record).split("\n")))
        return text if record.levelno < logging.WARNING else f"{_NAME}: {record.levelname.lower()}: {text}"


class _ForOthers(logging.Filter):
    """Passes other packages' records, and this package's if the handler has a format of its own."""

    def __init__(self, handler: logging.Handler):
        super().__init__()
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] != _NAME or _has_format(self._handler, record)


def _has_format(handler: logging.Handler, record: logging.LogRecord) -> bool:
    plain = f"{record.levelname}:{record.name}:{record.getMessage()}"
    return not isinstance(handler, logging.NullHandler) and handler.format(record) != plain


def show_lines() -> None:
    """Print the package's log, from level INFO on. A level that the program has set stays."""
    package = logging.getLogger(_NAME)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not any(isinstance(handler, _Lines) for handler in package.handlers):
        package.addHandler(_Lines())
