"""Shows the progress of checking and packing: a bar on standard error, faults on standard output."""

import sys
import time
from contextlib import AbstractContextManager, ExitStack

from rich import progress
from rich.console import Console

from jaxddp.core.phases import reported_to
from jaxddp.core.wording import counted, on_screen, speed

SECONDS_BETWEEN_LINES = 5.0


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar where standard error is a terminal, else a line every few seconds; `total` is the number of images."""

    def __init__(self, total: int):
        self._total = total
        self._begin = self._last = time.monotonic()
        self._bar: progress.Progress | None = None
        self._hearing = ExitStack()
        if sys.stderr.isatty():
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[pace]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                # Faults are printed above the bar if standard output is the terminal too, else to the file or pipe.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._task = self._bar.add_task("", total=total, pace="")
            self._bar.start()
            self._hearing.enter_context(reported_to(self._hear))

    def __exit__(self, *_: object) -> None:
        self._hearing.close()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, looked: int, faults: int) -> None:
        """Shows how many images were examined, and how many of them cannot be used."""
        now = time.monotonic()
        pace = f"{speed(looked / max(now - self._begin, 1e-9))} images/s, {faults:,} cannot be used"
        if self._bar is not None:
            self._bar.update(self._task, completed=looked, pace=pace)
        elif now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            print(f"{looked:,} of {counted(self._total, 'image')}, {pace}", file=sys.stderr, flush=True)

    def _hear(self, words: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=words)

    def fault(self, line: str) -> None:
        """Prints which image cannot be used, and why."""
        print(on_screen(line), flush=True)
