"""How the package's log looks, in notebooks as at the terminal: information as it is, warnings as errors look there.

A program that gives its root logger a format has these lines in that one. A format that nobody has chosen does not
count: absl, through which Orbax logs, calls `logging.basicConfig()`, and from then on lines would begin with
`WARNING:jaxddp.experiment:`.
"""

import logging
import sys

from jaxddp.core.wording import on_screen

_NAME = "jaxddp"


class _Lines(logging.Handler):
    """Called before the root logger's handlers are."""

    def emit(self, record: logging.LogRecord) -> None:
        chosen = [_is_chosen(handler, record) for handler in logging.root.handlers]
        for handler, is_chosen in zip(logging.root.handlers, chosen, strict=True):
            if not is_chosen and not any(isinstance(each, _OfOthers) for each in handler.filters):
                handler.addFilter(_OfOthers(handler))
        if not any(chosen):
            # Looked up each time: a progress display puts another one in its place.
            print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        """`jaxddp: warning: …`, and information alone."""
        told = "\n".join(map(on_screen, super().format(record).split("\n")))
        return told if record.levelno < logging.WARNING else f"{_NAME}: {record.levelname.lower()}: {told}"


class _OfOthers(logging.Filter):
    """What a handler shows beside `_Lines`: other packages' records, and this one's if it has a format by now."""

    def __init__(self, handler: logging.Handler):
        super().__init__()
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] != _NAME or _is_chosen(self._handler, record)


def _is_chosen(handler: logging.Handler, record: logging.LogRecord) -> bool:
    plain = f"{record.levelname}:{record.name}:{record.getMessage()}"
    return not isinstance(handler, logging.NullHandler) and handler.format(record) != plain


def show_lines() -> None:
    """Show what the package logs, from information on; a level that the program has set stays."""
    package = logging.getLogger(_NAME)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not any(isinstance(handler, _Lines) for handler in package.handlers):
        package.addHandler(_Lines())
