"""`curves.png`: the picture of a run in its work directory, drawn again as the run goes on."""

import time
from pathlib import Path

import jaxddp.files as files
from jaxddp.training import rows
from jaxddp.training.events import EvaluationRecord, RunEnd, RunStart, StepRecord

CURVES = "curves.png"


class Curves:
    """Draws `curves.png` from `metrics.jsonl`, so that a resumed run's curves are whole: at the end, and in between.

    In between, after an evaluation, at most a hundredth of the time goes into drawing. Among the listeners it comes
    after `JsonLines`, whose lines it reads.

    Raises:
        InputError: the picture cannot be written.
    """

    def __init__(self, metrics: Path, picture: Path):
        self._metrics = metrics
        self._picture = picture
        self._next = 0.0

    def start(self, run: RunStart) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass

    def evaluation(self, record: EvaluationRecord) -> None:
        begin = time.monotonic()
        if record.final and begin >= self._next:
            draw(self._metrics, self._picture)
            end = time.monotonic()
            self._next = end + 99 * (end - begin)

    def end(self, run: RunEnd) -> None:
        draw(self._metrics, self._picture)


def draw(metrics: Path, picture: Path) -> None:
    """Draws the curves of a `metrics.jsonl` into a PNG file, replaced whole.

    Raises:
        InputError: `metrics` cannot be read or has a line that is no row, or `picture` cannot be written.
    """
    # The first picture is drawn long after the first step, which need not wait for matplotlib's import.
    from jaxddp.training.curves_figure import figure, png

    files.replace(picture, png(figure(rows.series(rows.read(metrics)))))
