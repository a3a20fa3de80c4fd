"""Converts images that a user gives in Python to a source."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import show
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.opening import open_inputs
from jaxddp.data.source import Source
from jaxddp.workdir.signature import Signature

Images = np.ndarray | Source | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def source_of(images: Images, signature: Signature) -> Source:
    """Return images that `TrainedRun.predict` accepts as a source. Raises: InputError if arrays do not fit."""
    if isinstance(images, str | os.PathLike):
        return open_inputs([images])
    paths: list[Any] = [*images] if isinstance(images, list | tuple) else [None]
    if all(isinstance(path, str | os.PathLike) for path in paths):
        return open_inputs(paths)
    if isinstance(images, np.ndarray | jax.Array):
        images = signature.pixels(np.asarray(images))
        return ArrayTable(images, np.full(len(images), -1), signature.class_names)
    if not hasattr(images, "eval_batches"):
        raise InputError(f"images={show(images)}: give an array, a path, a list of paths, or a source")
    source: Any = images
    return source
