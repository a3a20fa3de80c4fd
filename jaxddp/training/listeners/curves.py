"""`curves.png`: the curves of a run, in the work directory. It is redrawn while the run continues."""

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
    """Return the listener that draws `curves.png` in the work directory."""
    return Curves(workdir / METRICS, workdir / CURVES)


class Curves(Listener):
    """A listener that draws `curves.png` from `metrics.jsonl`, so the curves of a resumed run are complete.

    In the list of listeners it must come after `JsonLines`. It draws at the end of the run, and after evaluations.
    Drawing takes at most a hundredth of the time. Raises: see `draw`.
    """

    def __init__(self, metrics: Path, picture: Path):
        self._metrics = metrics
        self._picture = picture
        self._next_draw = 0.0

    def evaluation(self, record: EvaluationRecord) -> None:
        begin = time.monotonic()
        if record.final and begin >= self._next_draw:
            draw(self._metrics, self._picture)
            end = time.monotonic()
            self._next_draw = end + 99 * (end - begin)

    def end(self, run: RunEnd) -> None:
        draw(self._metrics, self._picture)


def draw(metrics: Path, picture: Path) -> None:
    """Draw the curves of a `metrics.jsonl` into a PNG file. Raises: InputError if a file cannot be read or written."""
    # Imported here, so that the first step does not wait for matplotlib.
    from jaxddp.training.pictures import draw_and_free, figure, png

    files.replace(picture, draw_and_free(lambda: png(figure(series(row for _, row in parse(metrics))))))
