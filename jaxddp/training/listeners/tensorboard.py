"""TensorBoard event files, through clu."""

from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.registry import LOGGERS
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners.metric_rows import Row, RowListener, scalars
from jaxddp.training.validation.predicted_images import PredictedImages


class TensorBoard(RowListener):
    """A logger of scalars under `directory` (`train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, …).

    It also writes a picture with the predictions of `images` validation images, or of more images if another listener
    requests more.

    The files are opened at the first record, so the first step does not wait for the import of TensorFlow and Keras,
    which takes seconds. (A thread must not import them: other threads would find incomplete modules.)

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points of repeated steps. A run from step 0
    removes the event files in the directory. Raises: InputError if the directory cannot be written.
    """

    def __init__(self, directory: Path, images: int = 0):
        self._directory = directory
        self._writer: Any = None
        self.wants_predictions = images

    def start(self, run: RunStart) -> None:
        files.create(self._directory)
        if run.start_step == 0:
            for path in self._directory.glob("events.out.tfevents.*"):
                files.remove(path)

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        if self._writer is None:
            self._writer = _open(self._directory)
        self._writer.write_scalars(row["step"], scalars(row))
        if predictions is not None:
            from jaxddp.training.pictures import prediction_pixels

            picture = prediction_pixels(predictions)[None, ..., :3]
            self._writer.write_images(row["step"], {f"{row['split']}/predictions": picture})
        if row["split"] != "train":
            self._writer.flush()

    def end(self, run: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _open(directory: Path) -> Any:
    # This import must precede clu, which would import TensorFlow without our settings.
    from jaxddp.data.stream import tensorflow_cpu  # noqa: F401, I001
    from clu import metric_writers

    with files.readable_errors(directory):
        return metric_writers.SummaryWriter(str(directory))


LOGGERS.add("tensorboard")(lambda config, workdir: TensorBoard(workdir, config.log.images or 0))
