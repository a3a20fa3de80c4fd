"""`confusion.csv`: the confusion matrix of the last validation."""

import csv
import io
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.wording import as_text
from jaxddp.registry import LOGGERS
from jaxddp.training.events import EvaluationRecord, Listener, RunStart

CONFUSION = "confusion.csv"


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
