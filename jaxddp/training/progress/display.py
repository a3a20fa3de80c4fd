"""The choice of the progress display: live in a terminal or a notebook, plain lines elsewhere."""

import os
import sys
from typing import TextIO

from jaxddp.training.events import Listener, StepRecord
from jaxddp.training.progress import lines


def progress(stream: TextIO | None = None) -> Listener:
    """Return a live display in a terminal or a notebook if rich is installed, and plain lines otherwise.

    Without a standard output, as in a daemon, nothing is displayed.
    """
    output = stream or sys.stdout
    if output is None:
        return Listener()
    try:
        from jaxddp.training.progress import live
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        return PlainLines(output)
    if output.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return live.LiveDisplay(live.TerminalScreen(output))
    if output is sys.stdout and live.Console().is_jupyter:
        return live.LiveDisplay(live.NotebookScreen())
    return PlainLines(output)


class PlainLines(lines.RunLines):
    """A line for each logged step, epoch and evaluation; an epoch and the evaluation at its end share a line.

    If the output cannot be written (its disk is full, or the program that reads it has ended), training continues
    without printing more lines.
    """

    def __init__(self, stream: TextIO):
        super().__init__(self._print)
        self._stream = stream

    def step(self, record: StepRecord) -> None:
        # It prints the line of an epoch without an evaluation at its end, which comes before this step's line.
        super().step(record)
        self._print(lines.step(self._run, record, self.remaining(record)))

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except OSError:
            # Discard all later output, so that no later print, also at the program's exit, raises the error again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
