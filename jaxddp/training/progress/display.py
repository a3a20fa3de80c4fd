"""Progress on the screen: plain lines, for a log file, a pipe, a terminal without rich; live where that is possible."""

import os
import sys
from typing import TextIO

from jaxddp.training.events import Listener, StepRecord
from jaxddp.training.progress import lines


def progress(stream: TextIO | None = None) -> Listener:
    """A live display in a terminal or a notebook where rich is installed; plain lines everywhere else."""
    shown = stream or sys.stdout
    try:
        from jaxddp.training.progress import live
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        return PlainLines(shown)
    if shown.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return live.LiveDisplay(live.TerminalScreen(shown))
    if shown is sys.stdout and live.Console().is_jupyter:
        return live.LiveDisplay(live.NotebookScreen())
    return PlainLines(shown)


class PlainLines(lines.RunLines):
    """Prints one line a logged step, an epoch and an evaluation (an epoch and the evaluation at its end share one).

    A reader that ends (`jaxddp train … | head`) ends the lines, not the training.
    """

    def __init__(self, stream: TextIO):
        super().__init__(self._print)
        self._stream = stream

    def step(self, record: StepRecord) -> None:
        # Before this step's line, that of an epoch at whose end there was no evaluation.
        self.flush()
        self._print(lines.step(self._run, record, self.remaining(record)))
        super().step(record)

    def _print(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            # Otherwise everything that the program prints, also at its exit, would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
