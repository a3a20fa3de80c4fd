"""TensorBoard event files, through clu."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxddp.runtime import workdir
from jaxddp.runtime.listeners import rows
from jaxddp.runtime.records import EvaluationRecord, RunEnd, RunStart, StepRecord


class TensorBoard:
    """Writes scalars under `directory`: `train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, ….

    A thread writes them. It begins with importing TensorFlow, and for clu also Keras, which takes seconds: so it begins
    with the first record, and no step waits for it. An error of its shows at the next record, or at the end.

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points that it runs past again. A run from
    step 0 removes the event files that stand there.

    Raises:
        InputError: the directory cannot be made or written.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        workdir.create(self._directory)
        if run.start_step == 0:
            for path in self._directory.glob("events.out.tfevents.*"):
                workdir.remove(path)
        self._thread = ThreadPoolExecutor(1, "tensorboard")
        self._handed_over: list[Future[None]] = []

    def step(self, record: StepRecord) -> None:
        self._hand_over(rows.step_row(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self._hand_over(rows.evaluation_row(record), flush=True)

    def end(self, run: RunEnd) -> None:
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._raise_errors()

    def _hand_over(self, row: rows.Row, flush: bool = False) -> None:
        self._raise_errors()
        self._handed_over.append(self._thread.submit(self._write, row, flush))

    def _raise_errors(self) -> None:
        while self._handed_over and self._handed_over[0].done():
            first = self._handed_over.pop(0)
            if first.exception():
                # What was handed over after it would say the same again at the end.
                self._handed_over.clear()
            first.result()

    def _write(self, row: rows.Row, flush: bool) -> None:
        if self._writer is None:
            self._writer = _open(self._directory)
        scalars = {f"{row['split']}/{name}": value for name, value in row.items() if name not in ("step", "split")}
        self._writer.write_scalars(row["step"], scalars)
        if flush:
            self._writer.flush()


def _open(directory: Path) -> Any:
    # First, since clu imports TensorFlow as it comes, loud and fond of GPUs.
    from jaxddp.data import tensorflow_cpu  # noqa: F401, I001
    from clu import metric_writers

    with workdir.readable_errors(directory):
        return metric_writers.SummaryWriter(str(directory))
