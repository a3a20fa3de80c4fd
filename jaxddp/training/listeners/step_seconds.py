"""Where the seconds of a step go, by process and phase; and which process makes the others wait."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxddp.core.errors import InputError
from jaxddp.core.peers import Spent

FILE = "step_seconds.json"
"""In a work directory: what the last look at a job's processes found."""
_PHASES = {"training": "other", "listeners": "other"}
COLUMNS: tuple[str, ...] = ("input", "dispatch", "device", "save", "other")
_SLOW, _SHARE = 1.5, 0.1
_ROWS = 8


@dataclass(frozen=True)
class SlowPhase:
    """A process that takes longer in a phase than others do: seconds a step, and the median of all processes."""

    process: int
    phase: str
    seconds: float
    median: float

    def __str__(self) -> str:
        times = f"{self.seconds / self.median:.1f} times the median" if self.median > 0 else "and others none"
        return f"process {self.process} takes {self.seconds:.3g} s a step in phase {self.phase!r}, {times}"


@dataclass(frozen=True)
class StepSeconds:
    """Seconds a step of each process in each of `COLUMNS`, over the steps after `first` up to `last`."""

    first: int
    last: int
    seconds: Mapping[int, Mapping[str, float]]

    @classmethod
    def between(cls, before: Mapping[int, Spent], after: Mapping[int, Spent]) -> "StepSeconds | None":
        """What was spent between two looks; None where a process made no step meanwhile."""
        steps = {process: after[process][0] - before[process][0] for process in after.keys() & before.keys()}
        if not steps or min(steps.values()) < 1:
            return None
        seconds = {process: dict.fromkeys(COLUMNS, 0.0) for process in sorted(steps)}
        for process, columns in seconds.items():
            for phase, spent in after[process][1].items():
                if (column := _PHASES.get(phase, phase)) in COLUMNS:
                    columns[column] += (spent - before[process][1].get(phase, 0.0)) / steps[process]
        first = min(before[process][0] for process in steps)
        return cls(first, max(after[process][0] for process in steps), seconds)

    def slow(self) -> list[SlowPhase]:
        """Those that are 1.5 times the median and matter, a tenth of a step; the slowest first.

        On the devices all wait for the slowest process, so that phase counts only where nothing else is slow.
        """
        step = max(sum(columns.values()) for columns in self.seconds.values())
        found = list[SlowPhase]()
        for column in COLUMNS:
            median = statistics.median_low(columns[column] for columns in self.seconds.values())
            for process, columns in self.seconds.items():
                if columns[column] > _SLOW * median and columns[column] - median > _SHARE * step:
                    found.append(SlowPhase(process, column, columns[column], median))
        own = [each for each in found if each.phase != "device"]
        return sorted(own or found, key=lambda each: each.median - each.seconds)

    def table(self) -> list[str]:
        """The lines of a table, of the slowest processes of very many, and of the median."""
        slowest = dict.fromkeys(each.process for each in self.slow())
        shown = sorted([*slowest, *(process for process in self.seconds if process not in slowest)][:_ROWS])
        medians = [statistics.median_low(columns[column] for columns in self.seconds.values()) for column in COLUMNS]
        rows = {f"process {process}": [*self.seconds[process].values()] for process in shown} | {"median": medians}
        lines = ["".join([f"{'':<14}", *(f"{column:>10}" for column in COLUMNS)])]
        return lines + ["".join([f"{name:<14}", *(f"{value:>10.4f}" for value in row)]) for name, row in rows.items()]

    def dumps(self) -> bytes:
        """As `loads` takes it."""
        return (json.dumps({"first": self.first, "last": self.last, "seconds": self.seconds}) + "\n").encode()

    @classmethod
    def loads(cls, path: Path, content: bytes) -> "StepSeconds":
        """What `dumps` made. Raises: InputError; the file holds something else."""
        try:
            told = json.loads(content)
            seconds = {int(p): {column: float(c[column]) for column in COLUMNS} for p, c in told["seconds"].items()}
            return cls(int(told["first"]), int(told["last"]), seconds)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read ({error}); remove it, the next run writes it anew") from None
