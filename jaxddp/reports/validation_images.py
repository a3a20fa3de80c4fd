"""The validation images of a run: the predictions of a checkpoint for them, and thumbnails."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxddp.config import DataConfig
from jaxddp.data.opening import open_unchecked
from jaxddp.data.selection import chosen_images
from jaxddp.data.source import Source, SourceTable
from jaxddp.engine.compilation import keep_compiled_programs
from jaxddp.inference.outcome import Outcome
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import Topology
from jaxddp.training.validation.predicted_images import to_drawable

LONGEST_SIDE = 128


class ValidationImages(NamedTuple):
    """Images, the config for reading them, the predictions of a checkpoint for them, and the network itself."""

    outcome: Outcome
    source: SourceTable
    data: DataConfig
    run: TrainedRun


def predict_validation_images(directory: Path, which: str, data_path: str | None = None) -> ValidationImages:
    """Return the predictions of a checkpoint for the run's validation data, on all devices of this machine.

    The probabilities of an image that cannot be used are NaN.

    Args:
        which: "latest", "best" or a step; without validations "best" is the latest.
        data_path: the location of the data, if it is not the location in the run's config.

    Raises:
        InputError: the run's config does not name its network, the data or the checkpoint cannot be read, or the data
            have other classes than the run.
    """
    keep_compiled_programs()
    run = restore_run(directory, which, Topology.create())
    data = run.config.data if data_path is None else replace(run.config.data, path=data_path, name=None)
    # The same images as in the run's validations: the first `eval.limit`, in the same order.
    _, source = open_unchecked(data, run.config.eval.limit)
    return ValidationImages(run.outcome(source), source, run.data_of(source), run)


def thumbnails(source: Source, data: DataConfig, rows: np.ndarray) -> list[str]:
    """Return images as `data:` URLs of PNG files of at most 128x128 pixels. Raises: see `eval_batches`."""
    if not len(rows):
        return []
    return [_url(to_drawable(image)) for image in chosen_images(source, data, rows)]


def _url(pixels: np.ndarray) -> str:
    picture = Image.fromarray(pixels)
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
