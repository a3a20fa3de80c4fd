"""What takes longer than a second is said: by a thread that listens to what this process does, on a screen."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import jaxddp.core.phases as phases

PATIENCE_SECONDS = 1.0
"""What takes less is not worth a word."""
_BETWEEN_SECONDS = 1.0


class Screen(Protocol):
    """Where it is shown."""

    def show(self, words: str, seconds: float) -> None:
        """What lasts already so long; again and again, while it does."""
        ...

    def clear(self) -> None:
        """It is over, or something else begins."""
        ...


@contextmanager
def shown_on(screen: Screen) -> Iterator[None]:
    """During the block, the screen shows what lasts; afterwards it is clear, and no thread is left."""
    activity = _Activity(screen)
    activity.start()
    try:
        with phases.told_to(activity.begin):
            yield
    finally:
        activity.end()


class _Activity(threading.Thread):
    def __init__(self, screen: Screen):
        super().__init__(name="jaxddp-activity", daemon=True)
        self._screen, self._changed = screen, threading.Condition()
        self._words, self._begun, self._ended = "", 0.0, False

    def begin(self, words: str) -> None:
        """The words are no longer, or not yet, those of what lasts."""
        with self._changed:
            self._screen.clear()
            self._words, self._begun = words, time.monotonic()
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        with self._changed:
            while not self._ended:
                lasts = time.monotonic() - self._begun
                if self._words and lasts >= PATIENCE_SECONDS:
                    self._screen.show(self._words, lasts)
                    self._changed.wait(_BETWEEN_SECONDS)
                else:
                    self._changed.wait(PATIENCE_SECONDS - lasts if self._words else None)
