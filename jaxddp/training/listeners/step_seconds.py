"""The seconds of a step by process and phase, and the processes that make the others wait."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Spent

FILE = "step_seconds.json"
"""The file of a work directory that holds the last comparison of a job's processes."""
_COLUMN_OF_PHASE = {"training": "other", "listeners": "other"}
COLUMNS: tuple[str, ...] = ("input", "dispatch", "device", "save", "other")
_SLOW_FACTOR, _MIN_STEP_SHARE = 1.5, 0.1
_MAX_ROWS = 8


@dataclass(frozen=True)
class SlowPhase:
    """A process that is slower than others in a phase: its seconds per step, and the median of all processes."""

    process: int
    phase: str
    seconds: float
    median: float

    def __str__(self) -> str:
        times = f"{self.seconds / self.median:.1f} times the median" if self.median > 0 else "and the median is 0"
        return f"process {self.process} takes {self.seconds:.3g} s a step in phase {self.phase!r}, {times}"


@dataclass(frozen=True)
class StepSeconds:
    """The seconds per step of each process in each of `COLUMNS`, over the steps after `first` up to `last`."""

    first: int
    last: int
    seconds: Mapping[int, Mapping[str, float]]

    @classmethod
    def between(cls, before: Mapping[int, Spent], after: Mapping[int, Spent]) -> "StepSeconds | None":
        """Return the time spent between two measurements; None if a process made no step between them."""
        steps = {process: after[process][0] - before[process][0] for process in after.keys() & before.keys()}
        if not steps or min(steps.values()) < 1:
            return None
        seconds = {process: dict.fromkeys(COLUMNS, 0.0) for process in sorted(steps)}
        for process, columns in seconds.items():
            for phase, spent in after[process][1].items():
                if (column := _COLUMN_OF_PHASE.get(phase, phase)) in COLUMNS:
                    columns[column] += (spent - before[process][1].get(phase, 0.0)) / steps[process]
        first = min(before[process][0] for process in steps)
        return cls(first, max(after[process][0] for process in steps), seconds)

    def slow(self) -> list[SlowPhase]:
        """Return the processes and phases that are slower than the median, the slowest first.

        A slow phase takes over 1.5 times the median, and the difference is over a tenth of a step. In the phase
        "device" all processes wait for the slowest one, so this phase is returned only if no other phase is slow.
        """
        step = max(sum(columns.values()) for columns in self.seconds.values())
        slow_phases = list[SlowPhase]()
        for column in COLUMNS:
            median = statistics.median_low(columns[column] for columns in self.seconds.values())
            for process, columns in self.seconds.items():
                if columns[column] > _SLOW_FACTOR * median and columns[column] - median > _MIN_STEP_SHARE * step:
                    slow_phases.append(SlowPhase(process, column, columns[column], median))
        on_host = [each for each in slow_phases if each.phase != "device"]
        return sorted(on_host or slow_phases, key=lambda each: each.median - each.seconds)

    def table(self) -> list[str]:
        """Return the lines of a table with the slowest processes, at most eight, and the median."""
        slowest = dict.fromkeys(each.process for each in self.slow())
        listed = sorted([*slowest, *(process for process in self.seconds if process not in slowest)][:_MAX_ROWS])
        medians = [statistics.median_low(columns[column] for columns in self.seconds.values()) for column in COLUMNS]
        rows = {f"process {process}": [*self.seconds[process].values()] for process in listed} | {"median": medians}
        lines = ["".join([f"{'':<14}", *(f"{column:>10}" for column in COLUMNS)])]
        return lines + ["".join([f"{name:<14}", *(f"{value:>10.4f}" for value in row)]) for name, row in rows.items()]

    def dumps(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps({"first": self.first, "last": self.last, "seconds": self.seconds}) + "\n").encode()

    @classmethod
    def loads(cls, path: Path, content: bytes) -> "StepSeconds":
        """Parse the content of the file. Raises: InputError if the content is invalid."""
        try:
            entries = files.parse_json(content)
            seconds = {int(p): {column: float(c[column]) for column in COLUMNS} for p, c in entries["seconds"].items()}
            return cls(int(entries["first"]), int(entries["last"]), seconds)
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); remove it; the next run writes it again") from None
