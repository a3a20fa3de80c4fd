"""The validation images of a run: what a checkpoint predicts for them, and small pictures of some."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxddp.config import DataConfig
from jaxddp.data.opening import open_unchecked
from jaxddp.data.selection.chosen import chosen_images
from jaxddp.data.source import Source
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.inference.outcome import Outcome
from jaxddp.inference.trained import restore_run
from jaxddp.mesh import Topology
from jaxddp.training.validation.predicted_images import drawable

LONGEST_SIDE = 128


class ValidationImages(NamedTuple):
    """Images, the config by which they are read, and what a checkpoint predicts for them."""

    outcome: Outcome
    source: Source
    data: DataConfig


def predict_validation_images(directory: Path, which: str, data_path: str | None = None) -> ValidationImages:
    """The predictions of a checkpoint ("latest", "best" or a step) on all devices of this machine.

    They are of the validation data that the run measured: the first `eval.limit`, where it has one. The data lie where
    the run says, or at `data_path`. "best" is the latest where nothing was validated. An image that cannot be used has
    NaN.

    Raises:
        InputError: the run does not say its network, its data or its checkpoint cannot be read, or its data have other
            classes now.
    """
    keep_compiled_programs()
    run = restore_run(directory, which, Topology.create())
    data = run.config.data if data_path is None else replace(run.config.data, path=data_path, name=None)
    # Those that the run measured, and in its order.
    _, source = open_unchecked(data, run.config.eval.limit)
    return ValidationImages(run.outcome(source), source, run.data_of(source))


def thumbnails(source: Source, data: DataConfig, rows: np.ndarray) -> list[str]:
    """The images of some rows as `data:` URLs of PNG files, at most 128 pixels a side. Raises: as `eval_batches`."""
    if not len(rows):
        return []
    return [_url(drawable(image)) for image in chosen_images(source, data, rows)]


def _url(pixels: np.ndarray) -> str:
    picture = Image.fromarray(pixels)
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
