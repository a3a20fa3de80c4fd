"""Chooses how progress is shown."""

import os
import sys
from typing import TextIO

from jaxddp.runtime.listeners.plain import PlainLines
from jaxddp.runtime.records import Listener


def progress(stream: TextIO | None = None) -> Listener:
    """A live display in a terminal or a notebook where rich is installed; plain lines everywhere else.

    `stream` is standard output unless given.
    """
    shown = stream or sys.stdout
    try:
        from jaxddp.runtime.listeners import progress as live
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        return PlainLines(shown)
    if shown.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return live.Progress(live.TerminalScreen(shown))
    if shown is sys.stdout and live.in_notebook():
        return live.Progress(live.NotebookScreen())
    return PlainLines(shown)
