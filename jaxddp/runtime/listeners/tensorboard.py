"""TensorBoard event files, through clu. Importing this module imports TensorFlow (seconds): only when it is chosen."""

from pathlib import Path

# isort: off
# First, since clu imports TensorFlow as it comes, loud and fond of GPUs.
from jaxddp.data import tensorflow_cpu  # noqa: F401
from clu import metric_writers
# isort: on

from jaxddp.runtime import workdir
from jaxddp.runtime.listeners import rows
from jaxddp.runtime.records import EvaluationRecord, RunEnd, RunStart, StepRecord


class TensorBoard:
    """Writes scalars under `directory`: `train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, ….

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points that it runs past again. A run from
    step 0 removes the event files that stand there.

    Raises:
        InputError: the directory cannot be made or written.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def start(self, run: RunStart) -> None:
        workdir.create(self._directory)
        if run.start_step == 0:
            for path in self._directory.glob("events.out.tfevents.*"):
                workdir.remove(path)
        with workdir.readable_errors(self._directory):
            self._writer = metric_writers.SummaryWriter(str(self._directory))

    def step(self, record: StepRecord) -> None:
        self._write(rows.step_row(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self._write(rows.evaluation_row(record))
            self._writer.flush()

    def end(self, run: RunEnd) -> None:
        self._writer.close()

    def _write(self, row: rows.Row) -> None:
        scalars = {f"{row['split']}/{name}": value for name, value in row.items() if name not in ("step", "split")}
        self._writer.write_scalars(row["step"], scalars)
