"""Progress where nobody watches live: a log file, a pipe, a terminal without rich."""

import os
import sys
from typing import TextIO

from jaxddp.training.events import EvaluationRecord, RunEnd, RunStart, StepRecord
from jaxddp.training.listeners import lines


class PlainLines:
    """Prints one line a logged step, an epoch and an evaluation (an epoch and the evaluation at its end share one).

    No control characters. A reader that goes away (`jaxddp train … | head`) silences the lines, not the training.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream
        self._epochs = lines.EpochLines(self._print)

    def start(self, run: RunStart) -> None:
        self._run = run
        self._remaining = lines.Remaining(run)
        for line in lines.opening(run):
            self._print(line)

    def step(self, record: StepRecord) -> None:
        # Before this step's line, an epoch that waited for an evaluation in vain.
        self._epochs.flush()
        self._print(lines.step(self._run, record, self._remaining.seconds(record)))
        self._epochs.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._epochs.evaluation(record)

    def end(self, run: RunEnd) -> None:
        self._epochs.flush()
        self._print(lines.closing(run))

    def _print(self, line: str) -> None:
        # Looked up at each line: a notebook or a test may have exchanged sys.stdout since.
        stream = self._stream or sys.stdout
        try:
            print(line, file=stream, flush=True)
        except BrokenPipeError:
            # Whatever else the program prints, now or at its exit, would raise once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
