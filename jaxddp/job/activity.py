"""Shows the current activity of this process on a screen, if the activity takes longer than a second."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import jaxddp.core.phases as phases
from jaxddp.core.phases import Activity

PATIENCE_SECONDS = 1.0
"""The activity is shown after this time."""
_UPDATE_SECONDS = 1.0


class Screen(Protocol):
    """Displays the current activity."""

    def show(self, activity: Activity, /) -> None:
        """Display an activity. This is called repeatedly while the activity lasts."""
        ...

    def clear(self) -> None:
        """Remove the activity, because it ends or the next activity begins."""
        ...


@contextmanager
def show_on(screen: Screen) -> Iterator[None]:
    """Show long activities on a screen during the block. At its end, clear the screen and end the thread."""
    activity = _Activity(screen)
    activity.start()
    try:
        with phases.reported_to(activity.begin):
            yield
    finally:
        activity.end()


class _Activity(threading.Thread):
    def __init__(self, screen: Screen):
        super().__init__(name="jaxddp-activity", daemon=True)
        self._screen, self._condition = screen, threading.Condition()
        self._name, self._began, self._is_over = "", 0.0, False

    def begin(self, name: str) -> None:
        """Set the current activity; "" means that there is none."""
        with self._condition:
            self._screen.clear()
            self._name, self._began = name, time.monotonic()
            self._condition.notify()

    def end(self) -> None:
        with self._condition:
            self._is_over = True
            self._condition.notify()
        self.join()

    def run(self) -> None:
        while not self._is_over:
            with self._condition:
                seconds = time.monotonic() - self._began
                is_long = seconds >= PATIENCE_SECONDS
                if self._name and is_long:
                    self._screen.show(phases.activity())
                self._condition.wait(_UPDATE_SECONDS if is_long or not self._name else PATIENCE_SECONDS - seconds)
                is_elsewhere = not self._name and not self._is_over
            if is_elsewhere:
                # Another display may show the activity, such as the live display of a run.
                phases.repeat()
