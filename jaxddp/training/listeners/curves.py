"""`curves.png`: the picture of a run in its work directory, drawn again while the run continues."""

import time
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.registry import LOGGERS
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd
from jaxddp.training.listeners.jsonl import METRICS
from jaxddp.training.listeners.metric_rows import parse, series

CURVES = "curves.png"


@LOGGERS.add("curves")
def curves(config: Config, workdir: Path) -> "Curves":
    """`curves.png` in the work directory."""
    return Curves(workdir / METRICS, workdir / CURVES)


class Curves(Listener):
    """Draws `curves.png` from `metrics.jsonl`, so that a resumed run's curves are whole; it comes after `JsonLines`.

    It draws at the end and after evaluations, which takes at most a hundredth of the time. Raises: as `draw`.
    """

    def __init__(self, metrics: Path, picture: Path):
        self._metrics = metrics
        self._picture = picture
        self._next = 0.0

    def evaluation(self, record: EvaluationRecord) -> None:
        begin = time.monotonic()
        if record.final and begin >= self._next:
            draw(self._metrics, self._picture)
            end = time.monotonic()
            self._next = end + 99 * (end - begin)

    def end(self, run: RunEnd) -> None:
        draw(self._metrics, self._picture)


def draw(metrics: Path, picture: Path) -> None:
    """Draw the curves of a `metrics.jsonl` into a PNG file, replaced whole. Raises: InputError; of either file."""
    # The first step need not wait for matplotlib's import.
    from jaxddp.training.pictures import drawn, figure, png

    files.replace(picture, drawn(lambda: png(figure(series(row for _, row in parse(metrics))))))
