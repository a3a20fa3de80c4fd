"""The arrays of a network: their paths, such as "params/fc/kernel", their shapes, and those that are not trained."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.config.layers import Layers
from jaxddp.models.interface import Model, Tree

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


_MODE = "use_running_average"


def without_frozen(params: Tree, frozen: Layers) -> Tree:
    """Replace the frozen parameters by None."""
    return _select(params, lambda path: path not in frozen) if frozen else params


def with_frozen(partial: Tree, params: Tree) -> Tree:
    """Replace each None in a tree of trained parameters by the entry of `params`."""
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, partial, params, is_leaf=_is_none)


def with_frozen_state(before: Tree, after: Tree, frozen: Layers) -> Tree:
    """Return the model state `after`, with the state of frozen layers from `before`.

    A path may begin with the name of a collection. Without this function, the state of a frozen layer could change in
    the last bit, because a mean of equal numbers over the devices is rounded.
    """
    if not frozen:
        return after
    return with_frozen(_select(after, lambda path: not frozen.selects(path, path.partition("/")[2])), before)


def freeze_norms(frozen: Layers) -> Any:
    """Return a context in which the batch norms of frozen Linen layers use running statistics without updating them."""

    def call(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        # Batch norms of Flax and of this package have this field. A network may have a call argument of this name,
        # which it passes to its norms.
        is_norm = _MODE in {field.name for field in dataclasses.fields(module)}
        if context.method_name != "__call__" or not is_norm or "/".join(module.path) not in frozen:
            return function(*args, **kwargs)
        if getattr(module, _MODE, None) is None:
            bound = inspect.signature(type(module).__call__).bind(module, *args, **kwargs)
            bound.arguments[_MODE] = True
            _, *args = bound.args
            kwargs = bound.kwargs
        else:
            # Linen modules are frozen dataclasses. This instance may be changed, because Linen copied it for this call.
            object.__setattr__(module, _MODE, True)
        return function(*args, **kwargs)

    return nn.intercept_methods(call)


def _select(tree: Tree, is_selected: Callable[[str], bool]) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if is_selected(path_of(path)) else None, tree)


def _is_none(leaf: Any) -> bool:
    return leaf is None
