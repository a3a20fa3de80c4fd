"""Reports the progress of reading images as the activity of the process, and prints faults on standard output."""

import time
from contextlib import AbstractContextManager

from jaxddp.core.phases import doing, hidden, reached
from jaxddp.core.wording import on_screen, speed


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """The activity of reading images, with their number, their speed and the number of faults.

    Args:
        total: the number of images.
    """

    def __init__(self, description: str, total: int):
        self._started = time.monotonic()
        self._activity = doing(description, total, "image")

    def __enter__(self) -> "ProgressBar":
        self._activity.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._activity.__exit__(*error)  # pyright: ignore[reportArgumentType]

    def advance(self, done: int, faults: int) -> None:
        """Report the number of finished images, and the number of images that cannot be used."""
        pace = speed(done / max(time.monotonic() - self._started, 1e-9))
        reached(done, f"{pace} images/s{f', {faults:,} cannot be used' if faults else ''}")

    def print_fault(self, line: str) -> None:
        """Print a line about an image that cannot be used."""
        with hidden():
            print(on_screen(line), flush=True)
