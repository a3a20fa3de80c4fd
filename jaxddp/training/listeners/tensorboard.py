"""TensorBoard event files, through clu."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxddp.core.files as files
from jaxddp.registry import LOGGERS
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners.metric_rows import Row, RowListener, scalars
from jaxddp.training.validation.predicted_images import PredictedImages

_PLUGIN = "tensorboard.plugins.hparams"


class TensorBoard(RowListener):
    """A logger of scalars under `directory` (`train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, …).

    It also writes a picture with the predictions of `images` validation images, or of more images if another listener
    requests more.

    The files are opened at the first record, so the first step does not wait for the import of TensorFlow, which takes
    seconds. (A thread must not import them: other threads would find incomplete modules.)

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points of repeated steps. A run from step 0
    removes the event files in the directory. Raises: InputError if the directory cannot be written.
    """

    imports_tensorflow = True
    """The check of the memory before the first step counts TensorFlow."""

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
    from jaxddp.data.stream import tensorflow_cpu  # noqa: F401

    with _without_keras():
        from clu import metric_writers

    with files.readable_errors(directory):
        return metric_writers.SummaryWriter(str(directory))


@contextmanager
def _without_keras() -> Iterator[None]:
    """Import clu in the block without Keras, which would import scikit-learn and half of SciPy, in 1.1 s.

    clu imports tensorboard's plugin for hyperparameters. The plugin derives a class from a class of Keras; nothing here
    uses it.
    """
    package, keras, api = _PLUGIN, f"{_PLUGIN}._keras", f"{_PLUGIN}.api"
    if {"keras", keras, api} & sys.modules.keys():
        yield
        return
    stand_in = ModuleType(keras)
    stand_in.Callback = object  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[keras] = stand_in
    try:
        yield
    finally:
        # A later import of the plugin, by the user's code, finds the class of Keras.
        for name in (keras, api):
            sys.modules.pop(name, None)
            vars(sys.modules.get(package, stand_in)).pop(name.rpartition(".")[2], None)


LOGGERS.add("tensorboard")(lambda config, workdir: TensorBoard(workdir, config.log.images or 0))
