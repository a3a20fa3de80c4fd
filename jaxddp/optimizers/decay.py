"""Weight decay of kernels."""

from typing import Any

import jax
import optax

from jaxddp.config import Config
from jaxddp.sections.layers import longest_match

_TABLES = ("cls_token", "pos_embed")
"""A ViT's class token and position embeddings: arrays of several dimensions that are not kernels."""


def decayed(params: Any) -> Any:
    """Return a tree of bool: whether weight decay applies to a parameter.

    It applies to kernels, but not to biases and scales (He et al. 2018, arXiv:1812.01187, section 3.1), and not to a
    ViT's class token and position embeddings, as in timm.
    """
    return jax.tree_util.tree_map_with_path(lambda path, array: is_kernel(_name(path), array.ndim), params)


def is_kernel(name: str, ndim: int) -> bool:
    """Tell whether weight decay applies to a parameter, by its name and its number of dimensions."""
    return ndim > 1 and name.rpartition("/")[2] not in _TABLES


def add_decay(config: Config) -> optax.GradientTransformation:
    """Return a transformation that adds weight decay to the updates of kernels.

    The decay of a kernel is that of its layer in `optimizer.groups`, or else `optimizer.weight_decay`.
    """
    default, by_layer = config.optimizer.weight_decay, config.optimizer.layer_settings.decays
    if not by_layer:
        return optax.add_decayed_weights(default, mask=decayed)

    def add(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        name = _name(path)
        decay = longest_match(by_layer, name, default) if is_kernel(name, param.ndim) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
