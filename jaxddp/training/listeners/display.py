"""Chooses how progress is shown."""

import os
import sys
from typing import TextIO

from jaxddp.training.events import Listener
from jaxddp.training.listeners.plain import PlainLines


def progress(stream: TextIO | None = None) -> Listener:
    """A live display in a terminal or a notebook where rich is installed; plain lines everywhere else.

    `stream` is standard output unless given.
    """
    shown = stream or sys.stdout
    try:
        from jaxddp.training.listeners import live
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        return PlainLines(shown)
    if shown.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return live.LiveDisplay(live.TerminalScreen(shown))
    if shown is sys.stdout and live.in_notebook():
        return live.LiveDisplay(live.NotebookScreen())
    return PlainLines(shown)
