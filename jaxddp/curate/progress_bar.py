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
    """A bar if standard error is a terminal, else a line every few seconds; `total` is the number of images."""

    def __init__(self, total: int):
        self._total = total
        self._started = self._last_printed = time.monotonic()
        self._bar: progress.Progress | None = None
        self._subscription = ExitStack()
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
            self._task = self._bar.add_task("", total=total, speed_and_faults="")
            self._bar.start()
            self._subscription.enter_context(reported_to(self._set_description))

    def __exit__(self, *_: object) -> None:
        self._subscription.close()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, done: int, faults: int) -> None:
        """Show the number of finished images, and the number of images that cannot be used."""
        now = time.monotonic()
        speed_and_faults = f"{speed(done / max(now - self._started, 1e-9))} images/s, {faults:,} cannot be used"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, speed_and_faults=speed_and_faults)
        elif now - self._last_printed >= SECONDS_BETWEEN_LINES:
            self._last_printed = now
            print(f"{done:,} of {counted(self._total, 'image')}, {speed_and_faults}", file=sys.stderr, flush=True)

    def _set_description(self, description: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=description)

    def print_fault(self, line: str) -> None:
        """Print a line about an image that cannot be used."""
        print(on_screen(line), flush=True)
