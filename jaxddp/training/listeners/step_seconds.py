"""The seconds of a step by process and phase: a listener reports the process that makes the others wait."""

import contextlib
import json
import logging
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers, Spent
from jaxddp.training.events import Listener, RunStart, StepRecord

FILE = "step_seconds.json"
"""The file of a work directory that holds the last comparison of a job's processes."""
_PHASES = ("input", "dispatch", "device", "save")
COLUMNS: tuple[str, ...] = (*_PHASES, "other")
"""The phases of a step; "other" is the sum of "training" and "listeners"."""
_SLOW_FACTOR, _MIN_STEP_SHARE, _MAX_ROWS = 1.5, 0.1, 8
COMPARISON_SECONDS = 30.0
"""Seconds between two comparisons: long enough that single slow steps do not matter."""
_LOG_SECONDS = 600.0
_log = logging.getLogger("jaxddp.training")


class SlowPhase(NamedTuple):
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
        seconds = dict[int, Mapping[str, float]]()
        for process in sorted(after.keys() & before.keys()):
            (begin, earlier), (end, later) = before[process], after[process]
            if end <= begin:
                return None
            spent = {phase: (later[phase] - earlier.get(phase, 0.0)) / (end - begin) for phase in later}
            other = spent.get("training", 0.0) + spent.get("listeners", 0.0)
            seconds[process] = {phase: spent.get(phase, 0.0) for phase in _PHASES} | {"other": other}
        if not seconds:
            return None
        return cls(min(before[each][0] for each in seconds), max(after[each][0] for each in seconds), seconds)

    @property
    def medians(self) -> dict[str, float]:
        """The median of all processes in each column."""
        return {name: statistics.median_low(columns[name] for columns in self.seconds.values()) for name in COLUMNS}

    def slow(self) -> list[SlowPhase]:
        """Return the processes and phases that are slower than the median, the slowest first.

        A slow phase takes over 1.5 times the median, and the difference is over a tenth of a step. In the phase
        "device" all processes wait for the slowest one, so this phase is returned only if no other phase is slow.
        """
        step = max(sum(columns.values()) for columns in self.seconds.values())
        slow_phases = [
            SlowPhase(process, column, columns[column], median)
            for column, median in self.medians.items()
            for process, columns in self.seconds.items()
            if columns[column] > _SLOW_FACTOR * median and columns[column] - median > _MIN_STEP_SHARE * step
        ]
        on_host = [each for each in slow_phases if each.phase != "device"]
        return sorted(on_host or slow_phases, key=lambda each: each.median - each.seconds)

    def table(self) -> list[str]:
        """Return the lines of a table with the slowest processes, at most eight, and the median."""
        listed = sorted([*dict.fromkeys((*(each.process for each in self.slow()), *self.seconds))][:_MAX_ROWS])
        rows = {f"process {process}": self.seconds[process] for process in listed} | {"median": self.medians}
        lines = {name: [f"{row[column]:.4f}" for column in COLUMNS] for name, row in rows.items()}
        return [
            f"{name:<14}" + "".join(f"{cell:>10}" for cell in line) for name, line in ({"": COLUMNS} | lines).items()
        ]

    def dumps(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(vars(self)) + "\n").encode()

    @classmethod
    def loads(cls, path: Path, content: bytes) -> "StepSeconds":
        """Parse the content of the file. Raises: InputError if the content is invalid."""
        try:
            entries = files.parse_json(content)
            seconds = {int(p): {column: float(c[column]) for column in COLUMNS} for p, c in entries["seconds"].items()}
            return cls(int(entries["first"]), int(entries["last"]), seconds)
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); remove it; the next run writes it again") from None


class SlowProcesses(Listener):
    """A listener that compares the time of processes by phase. It logs a slow process, at most every ten minutes."""

    def __init__(self, peers: Peers):
        self._peers = peers

    def start(self, run: RunStart) -> None:
        self._file = None if run.workdir is None else run.workdir / FILE
        self._previous: Mapping[int, Spent] | None = None
        self._compared_at, self._logged_at = 0.0, dict[tuple[int, str], float]()

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if self._previous is not None and now - self._compared_at < COMPARISON_SECONDS:
            return
        spent = self._peers.spent()
        if self._previous is not None:
            if (difference := StepSeconds.between(self._previous, spent)) is None:
                return
            self._report(difference, now)
        self._previous, self._compared_at = spent, now

    def _report(self, spent: StepSeconds, now: float) -> None:
        if self._file is not None:
            # This file is optional. If the disk is full, writing a file that the run needs raises the error.
            with contextlib.suppress(InputError):
                files.replace(self._file, spent.dumps())
        # A slow process is named by its number and its phase.
        if slow := [each for each in spent.slow() if now - self._logged_at.get(each[:2], -math.inf) >= _LOG_SECONDS]:
            self._logged_at |= {each[:2]: now for each in slow}
            steps = f"seconds a step, from step {spent.first + 1:,} to {spent.last:,}:"
            _log.warning("\n".join([f"{slow[0]}; {steps}", *spent.table()]))
