"""Images of a source as evaluation sees them, small, for a page that holds them itself."""

import base64
import io

import numpy as np
from PIL import Image

from jaxddp.config import DataConfig
from jaxddp.data.chosen import chosen_images
from jaxddp.data.source import Source
from jaxddp.training.validation.predicted_images import drawable

LONGEST_SIDE = 128


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
