"""Shows the activity of a command on standard error: a line on a terminal, and sparse lines in a file or a pipe."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from jaxddp.core.phases import Activity
from jaxddp.core.wording import on_screen

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_OF_LINES = (10.0, 30.0)
"""In a file or a pipe, seconds until the second line of an activity, and between further lines."""
_BAR = 20
"""The number of characters of a bar."""
_BAR_AND_WORDS = 60
"""The width of a terminal from which on the line has a bar."""


class StatusLine:
    """A line on standard error with the current activity. On a terminal, it is erased after the activity.

    In a file or a pipe, the description of an activity is printed at once, and again with its progress after 10 s and
    then every 30 s, so that the log of a long job shows that it is alive.
    """

    def __init__(self) -> None:
        self._drawn: Console | None = None
        self._last = Activity()
        self._next_seconds = SECONDS_OF_LINES[0]

    def show(self, activity: Activity) -> None:
        """Show an activity."""
        with contextlib.suppress(OSError, ValueError):  # Standard error may be closed.
            if not (sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")):
                self._print(activity)
                return
            from rich.console import Console
            from rich.text import Text

            self.clear()
            self._drawn = Console(stderr=True, highlight=False)
            bar = _bar(activity, self._drawn) if self._drawn.width >= _BAR_AND_WORDS else ""
            line = Text(on_screen(f"{activity.description} ... {bar}{activity.details()}"), "dim")
            # The next output begins at the left margin and overwrites the line.
            self._drawn.print(line, end="\r", no_wrap=True, overflow="ellipsis")

    def clear(self) -> None:
        """Erase the line if it is visible."""
        if self._drawn is None:
            return
        from rich.control import Control
        from rich.segment import ControlType

        with contextlib.suppress(OSError, ValueError):
            self._drawn.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        self._drawn = None

    def _print(self, activity: Activity) -> None:
        seconds, words, last, self._last = activity.seconds, f"{activity.description} ...", self._last, activity
        if activity.began != last.began:
            self._next_seconds = SECONDS_OF_LINES[0]
        if seconds >= self._next_seconds:
            self._next_seconds = seconds + SECONDS_OF_LINES[1]
            words = f"{words} {activity.details()}"
        elif activity.description == last.description:
            return
        print(on_screen(words), file=sys.stderr, flush=True)


def _bar(activity: Activity, console: "Console") -> str:
    """Return a bar for the completed share; "" if the amount of work is unknown."""
    if activity.share is None:
        return ""
    done, left = ("#", "-") if console.legacy_windows or console.options.ascii_only else ("━", "─")
    filled = int(_BAR * activity.share)
    return f"{done * filled}{left * (_BAR - filled)} "
