"""TensorBoard event files, through clu."""

from pathlib import Path
from typing import Any

import jaxddp.files as files
from jaxddp.training import rows
from jaxddp.training.events import EvaluationRecord, RunEnd, RunStart, StepRecord


class TensorBoard:
    """Writes scalars under `directory`: `train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, ….

    The files are opened at the first record: what they need, TensorFlow and for clu also Keras, takes seconds to
    import, in which no first step is kept waiting. (No thread may import: others would see half of it.)

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points that it runs past again. A run from
    step 0 removes the event files that stand there.

    Raises:
        InputError: the directory cannot be made or written.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        files.create(self._directory)
        if run.start_step == 0:
            for path in self._directory.glob("events.out.tfevents.*"):
                files.remove(path)

    def step(self, record: StepRecord) -> None:
        self._write(rows.step_row(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self._write(rows.evaluation_row(record))
            self._writer.flush()

    def end(self, run: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, row: rows.Row) -> None:
        if self._writer is None:
            self._writer = _open(self._directory)
        scalars = {f"{row['split']}/{name}": value for name, value in row.items() if name not in ("step", "split")}
        self._writer.write_scalars(row["step"], scalars)


def _open(directory: Path) -> Any:
    # First, since clu imports TensorFlow as it comes, loud and fond of GPUs.
    from jaxddp.data import tensorflow_cpu  # noqa: F401, I001
    from clu import metric_writers

    with files.readable_errors(directory):
        return metric_writers.SummaryWriter(str(directory))
