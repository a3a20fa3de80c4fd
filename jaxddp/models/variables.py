"""Paths and shapes of a network's arrays, such as "params/fc/kernel" and "batch_stats/bn1/mean"."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.models.interface import Model

PARAMS = "params/"
"""The prefix of the paths of parameters, which distinguishes them from paths in the model's state."""


def path_of(path: Any) -> str:
    """Return a JAX key path as text, such as "layer1_0/conv1/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def trees_of(model: Model, image_shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """Return a network's parameters and state for images [H, W, C], as shapes and dtypes."""
    example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), example)


def shapes_of(model: Model, image_shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's arrays for images [H, W, C], by path."""
    return {path: leaf.shape for path, leaf in by_path(*trees_of(model, image_shape)).items()}


def by_path(params: Any, model_state: Any) -> dict[str, Any]:
    """Return the arrays of a network by path."""
    return {
        prefix + path_of(path): leaf
        for prefix, tree in ((PARAMS, params), ("", model_state))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def parameter_names(paths: Iterable[str]) -> list[str]:
    """Return the names of the parameters among these paths, such as "fc/kernel"."""
    return [path.removeprefix(PARAMS) for path in paths if path.startswith(PARAMS)]
