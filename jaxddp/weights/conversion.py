"""Convert arrays of weights to those of a network for images of another size or with other channels."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxddp.core.wording import counted
from jaxddp.models.published import PositionGrid

_PUBLISHED_CHANNELS = (1, 3)
"""The numbers of channels of weights that can be converted."""


@dataclass(frozen=True)
class Conversion:
    """A conversion of one array.

    Attributes:
        description: the conversion in words, for the log.
        convert: a function of the array, which returns an array with the shape of the network's.
    """

    description: str
    convert: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ImageArrays:
    """The arrays of a network that depend on the images.

    Attributes:
        channels: the number of channels of the network's images.
        positions: the grids of the network's position embeddings, by path.
        stored_positions: the grids of the weights' position embeddings, if they are known. A grid that is not known is
            square.
    """

    channels: int
    positions: Mapping[str, PositionGrid] = field(default_factory=dict)
    stored_positions: Mapping[str, PositionGrid] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Any, image_shape: tuple[int, int, int], stored_shape: tuple[int, int, int] | None = None
    ) -> "ImageArrays":
        """Return the arrays of a model or an adapted module for images [H, W, C].

        Args:
            stored_shape: the shape of the images on which the weights were trained, if it is known.
        """
        grids: Any = getattr(getattr(model, "module", model), "position_grids", lambda height, width: {})
        *size, channels = image_shape
        return cls(channels, grids(*size), grids(*stored_shape[:2]) if stored_shape else {})


def conversions(
    shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray], images: ImageArrays
) -> dict[str, Conversion]:
    """Return the conversions of arrays with another shape than the network's, by path.

    Args:
        shapes: the shapes of the network's arrays, by path.
        arrays: the arrays of the weights in the layout of the network, by path.
    """
    others = [path for path, array in arrays.items() if array.shape != shapes[path]]
    kernels = [path for path in others if _differs_in_channels(shapes[path], arrays[path].shape, images.channels)]
    # If several kernels differ like this, their inputs are not images.
    found = {path: _of_channels(arrays[path].shape[2], images.channels) for path in kernels if len(kernels) == 1}
    for path, grid in images.positions.items():
        stored = _stored_grid(arrays[path].shape, grid, images.stored_positions.get(path)) if path in others else None
        if stored is not None and arrays[path].shape[2:] == shapes[path][2:]:
            found[path] = _of_positions(stored, grid)
    return found


def _differs_in_channels(shape: tuple[int, ...], stored: tuple[int, ...], channels: int) -> bool:
    """Return whether two shapes are those of a first convolution, HWIO, for other channels."""
    is_first = len(shape) == len(stored) == 4 and shape[2] == channels and stored[2] in _PUBLISHED_CHANNELS
    return is_first and (*shape[:2], shape[3]) == (*stored[:2], stored[3])


def _of_channels(stored: int, channels: int) -> Conversion:
    """Return the conversion of a first kernel to another number of channels, as timm's `adapt_input_conv`.

    For one channel the kernels of all channels are summed, so a gray image has the same result as an image whose
    channels are all equal to it. For other numbers the channels are repeated, and scaled to keep the size of the sum.
    """
    if channels == 1:
        text = f"the sum of its {counted(stored, 'channel')}, for gray images"
        return Conversion(text, lambda kernel: kernel.astype(np.float64).sum(2, keepdims=True))
    text = f"its {counted(stored, 'channel')} repeated to {channels}, times {stored}/{channels}"
    chosen = np.arange(channels) % stored
    return Conversion(text, lambda kernel: kernel.astype(np.float64)[:, :, chosen] * (stored / channels))


def _stored_grid(shape: tuple[int, ...], grid: PositionGrid, known: PositionGrid | None) -> PositionGrid | None:
    """Return the grid of stored position embeddings [1, tokens, D]; None if their number is not that of a grid."""
    count = shape[1] - grid.class_tokens if len(shape) == 3 else -1
    if known is None:
        side = math.isqrt(max(count, 0))
        known = dataclasses.replace(grid, rows=side, columns=side)
    return known if known.rows * known.columns == count > 0 else None


def _of_positions(stored: PositionGrid, grid: PositionGrid) -> Conversion:
    """Return the conversion of position embeddings [1, tokens, D] to another grid, as timm's `resample_abs_pos_embed`.

    The interpolation is bicubic, with antialiasing if the grid becomes smaller, in float32. Class tokens are unchanged.
    """

    def convert(table: np.ndarray) -> np.ndarray:
        from PIL import Image

        table = table.astype(np.float32)
        at_patches = table[0, grid.class_tokens :].reshape(stored.rows, stored.columns, -1)
        size, method = (grid.columns, grid.rows), Image.Resampling.BICUBIC
        features = [Image.fromarray(np.ascontiguousarray(feature)) for feature in np.moveaxis(at_patches, 2, 0)]
        resized = np.stack([np.asarray(feature.resize(size, method)) for feature in features], axis=-1)
        return np.concatenate([table[0, : grid.class_tokens], resized.reshape(-1, table.shape[2])])[None]

    sizes = f"{stored.rows}x{stored.columns} patches to {grid.rows}x{grid.columns}"
    return Conversion(f"interpolated from {sizes}", convert)
