"""Convert a network's arrays to and from the layout of a PyTorch state dict: names and order of axes.

The network defines the names (`jaxddp.models.published`). The order of axes depends on the kind of array.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxddp.models.published import Naming

# torchvision's layer scales of ConvNeXt are [C, 1, 1], to match images of [C, H, W].
_IMAGE_SHAPED = "layer_scale"


def namings_of(model: Any) -> tuple[Naming, ...]:
    """Return the namings of a model or an adapted module: those of published libraries, then `dotted_path`.

    `dotted_path` is used to read and write networks without published weights.
    """
    module = getattr(model, "module", model)
    published: Any = getattr(module, "published_names", tuple)
    return (*published(), dotted_path)


def constants_of(model: Any) -> dict[str, np.ndarray]:
    """Return the constants that a model's first naming includes, by published name; see `jaxddp.models.published`."""
    constants: Any = getattr(getattr(model, "module", model), "published_constants", dict)
    return constants()


def has_published_names(model: Any) -> bool:
    """Return whether torchvision or timm publish a network with the arrays of a model or an adapted module."""
    return len(namings_of(model)) > 1


def dotted_path(path: str) -> str:
    """Return an array's path with dots, such as "params.layer1_0.conv1.kernel"."""
    return path.replace("/", ".")


def to_published(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """Convert an array to PyTorch's layout: kernels from HWIO to OIHW, and from IO to OI."""
    if name == dotted_path(path):
        return array
    if path.endswith("/kernel") and array.ndim in (2, 4):
        return array.T if array.ndim == 2 else array.transpose(3, 2, 0, 1)
    return array.reshape(-1, 1, 1) if name.endswith(_IMAGE_SHAPED) else array


def from_published(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """Convert an array from PyTorch's layout; the inverse of `to_published`."""
    if name == dotted_path(path):
        return array
    if path.endswith("/kernel") and array.ndim in (2, 4):
        return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)
    return array.reshape(-1) if name.endswith(_IMAGE_SHAPED) else array


def published(arrays: Mapping[str, np.ndarray], naming: Naming) -> dict[str, np.ndarray]:
    """Return the state dict of the arrays, a dict by path."""
    return {naming(path): to_published(path, naming(path), array) for path, array in arrays.items()}
