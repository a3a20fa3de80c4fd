"""Loggers of single files in the work directory: `curves.png`, `parameters.txt` and `confusion.csv`."""

import csv
import io
import time
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import LOGGERS
from jaxddp.core.errors import as_text
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd, RunStart
from jaxddp.training.listeners.jsonl import METRICS, parse, series

CURVES = "curves.png"
PARAMETERS = "parameters.txt"
CONFUSION = "confusion.csv"


class Curves(Listener):
    """A listener that draws `curves.png` from `metrics.jsonl`, so the curves of a resumed run are complete.

    In the list of listeners it must come after `JsonLines`. It draws at the end of the run, and after evaluations.
    Drawing takes at most a hundredth of the time. Raises: see `draw`.
    """

    def __init__(self, metrics: Path, picture: Path):
        self._files, self._next_draw = (metrics, picture), 0.0

    def evaluation(self, record: EvaluationRecord) -> None:
        begin = time.monotonic()
        if record.final and begin >= self._next_draw:
            draw(*self._files)
            end = time.monotonic()
            self._next_draw = end + 99 * (end - begin)

    def end(self, run: RunEnd) -> None:
        draw(*self._files)


LOGGERS.add("curves")(lambda config, workdir: Curves(workdir / METRICS, workdir / CURVES))


def draw(metrics: Path, picture: Path) -> None:
    """Draw the curves of a `metrics.jsonl` into a PNG file. Raises: InputError if a file cannot be read or written."""
    # Imported here, so that the first step does not wait for matplotlib.
    from jaxddp.training.pictures import draw_and_free, figure, png

    files.replace(picture, draw_and_free(lambda: png(figure(series(row for _, row in parse(metrics))))))


class ParameterOverview(Listener):
    """A logger that writes `parameters.txt` at the start of a run. Raises: InputError if the file cannot be written."""

    def __init__(self, directory: Path):
        self._path = directory / PARAMETERS

    def start(self, run: RunStart) -> None:
        if run.params is None:
            return
        # Imported here, because only this logger needs clu.
        import jax
        from clu import parameter_overview

        leaves, _ = jax.tree_util.tree_flatten_with_path(run.params)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        table = parameter_overview.get_parameter_overview(named, include_stats=False)
        files.create(self._path.parent)
        files.replace(self._path, (table + "\n").encode())


LOGGERS.add("parameters")(lambda config, workdir: ParameterOverview(workdir))


class ConfusionTable(Listener):
    """A logger of `confusion.csv`, written after each validation: a row for each class; the first field holds the step.

    A row holds the class, its accuracy (empty for a class without images), its number of images, and how many of them
    were predicted as each class. Raises: InputError if the file cannot be written.
    """

    wants_metrics = ("confusion",)

    def __init__(self, directory: Path, *, guard_formulas: bool = False):
        self._file, self._guard_formulas = directory / CONFUSION, guard_formulas
        self._names: tuple[str, ...] = ()

    def start(self, run: RunStart) -> None:
        self._names = tuple(map(as_text, run.class_names)) if self._guard_formulas else run.class_names
        files.create(self._file.parent)

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final and record.split == "val" and "confusion" in record.sets:
            files.replace(self._file, confusion_csv(record.sets["confusion"], self._names, record.step))


def confusion_csv(matrix: np.ndarray, names: tuple[str, ...], step: int) -> bytes:
    """Return a confusion matrix int[K, K], with labels in rows, as CSV with class names."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write([f"step {step}", "accuracy", "images", *names])
    for name, row, right in zip(names, matrix.tolist(), matrix.diagonal().tolist(), strict=True):
        write([name, right / sum(row) if sum(row) else "", sum(row), *row])
    return text.getvalue().encode()


LOGGERS.add("confusion")(lambda config, workdir: ConfusionTable(workdir, guard_formulas=config.log.guard_formulas))
