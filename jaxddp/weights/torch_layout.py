"""Where the arrays of a network stand in a state dict of PyTorch's: their names and the order of their axes.

A network says the names (`jaxddp.models.published`); the axes follow from the kind of array.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxddp.models.published import Naming

# torchvision's scales of ConvNeXt's branches are [C, 1, 1], beside images of [C, H, W].
_IMAGE_SHAPED = "layer_scale"


def namings_of(model: Any) -> tuple[Naming, ...]:
    """How libraries name the arrays of a model, adapted or not; and its own paths, with dots, as the last.

    Those are what this package reads and writes of networks that nobody published.
    """
    module = getattr(model, "module", model)
    published: Any = getattr(module, "published_names", tuple)
    return (*published(), own_name)


def own_name(path: str) -> str:
    """ "params.layer1_0.conv1.kernel"."""
    return path.replace("/", ".")


def to_published(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """An array in PyTorch's layout: of kernels HWIO becomes OIHW, and IO becomes OI."""
    if name == own_name(path):
        return array
    if path.endswith("/kernel") and array.ndim in (2, 4):
        return array.T if array.ndim == 2 else array.transpose(3, 2, 0, 1)
    return array.reshape(-1, 1, 1) if name.endswith(_IMAGE_SHAPED) else array


def from_published(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """The inverse of `to_published`."""
    if name == own_name(path):
        return array
    if path.endswith("/kernel") and array.ndim in (2, 4):
        return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)
    return array.reshape(-1) if name.endswith(_IMAGE_SHAPED) else array


def published(arrays: Mapping[str, np.ndarray], naming: Naming) -> dict[str, np.ndarray]:
    """A state dict of arrays by path."""
    return {naming(path): to_published(path, naming(path), array) for path, array in arrays.items()}
