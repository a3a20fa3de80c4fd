"""What a process does, in the words that the displays of progress show."""

import time
from typing import NamedTuple

from jaxddp.core.wording import counted, duration, size

BYTES = "bytes"
"""The unit of an amount of bytes, which is shown in kB, MB and so on."""


class Activity(NamedTuple):
    """What a process does, for users.

    Attributes:
        description: such as "compiling the step"; "" if there is nothing to show.
        total: the amount of work, in the unit `noun`; 0 if it is unknown.
        began: the time at which it began, as `time.monotonic` returns it.
        done: the completed amount.
        note: further information, such as the speed.
    """

    description: str = ""
    total: int = 0
    noun: str = ""
    began: float = 0.0
    done: int = 0
    note: str = ""

    @property
    def seconds(self) -> float:
        """Seconds since the activity began."""
        return time.monotonic() - self.began

    @property
    def share(self) -> float | None:
        """The completed share, 0 to 1; None if the amount of work is unknown."""
        return min(self.done / self.total, 1.0) if self.total > 0 else None

    def details(self) -> str:
        """Return the completed amount, the elapsed and the remaining time: `512 of 1,024 files, 24 s, 24 s left`."""
        seconds, amount = self.seconds, []
        if self.done and self.noun == BYTES:
            amount = [f"{size(self.done)} of {size(self.total)}" if self.total else size(self.done)]
        elif self.done:
            of_total = f"{self.done:,} of {counted(self.total, self.noun)}" if self.total else ""
            amount = [of_total or counted(self.done, self.noun)]
        share = self.share
        left = [f"{_whole(seconds / share - seconds)} left"] if share and self.done < self.total else []
        return ", ".join([*amount, _whole(seconds), *left, *filter(None, [self.note])])


def _whole(seconds: float) -> str:
    """Return a duration without fractions of a second."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)
