"""Parameters and statistics that training leaves as they are.

In a tree of what is trained the others are None, which for JAX is a place without an array: they have no gradient, and
an optimizer keeps nothing for them.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxddp.models.interface import Tree
from jaxddp.models.variables import path_of
from jaxddp.sections.layers import Layers

_MODE = "use_running_average"


def trained(params: Tree, frozen: Layers) -> Tree:
    """The parameters with None in place of the frozen ones."""
    return _chosen(params, lambda path: path not in frozen) if frozen else params


def whole(part: Tree, params: Tree) -> Tree:
    """What `trained` made, or what came of it, with `params` in place of None."""
    return jax.tree.map(lambda own, other: other if own is None else own, part, params, is_leaf=_is_none)


def kept(before: Tree, after: Tree, frozen: Layers) -> Tree:
    """The model's state of `after`, but that of frozen layers of `before`; a path may begin with a collection's name.

    A mean over devices of equal numbers may differ from them in the last bit.
    """
    if not frozen:
        return after
    return whole(_chosen(after, lambda path: not frozen.holds(path, path.partition("/")[2])), before)


def evaluating_norms(frozen: Layers) -> Any:
    """A context in which the batch norms of frozen Linen layers use their running statistics, and keep them."""

    def call(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        # As Flax's norms and ours have it; a network that takes such an argument passes it on.
        is_norm = _MODE in {field.name for field in dataclasses.fields(module)}
        if context.method_name != "__call__" or not is_norm or "/".join(module.path) not in frozen:
            return function(*args, **kwargs)
        if getattr(module, _MODE, None) is None:
            bound = inspect.signature(type(module).__call__).bind(module, *args, **kwargs)
            bound.arguments[_MODE] = True
            _, *args = bound.args
            kwargs = bound.kwargs
        else:
            # A module's attributes cannot be set, but this one is a copy that Linen made for this call.
            object.__setattr__(module, _MODE, True)
        return function(*args, **kwargs)

    return nn.intercept_methods(call)


def _chosen(tree: Tree, chosen: Callable[[str], bool]) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if chosen(path_of(path)) else None, tree)


def _is_none(leaf: Any) -> bool:
    return leaf is None
