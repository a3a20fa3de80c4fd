"""Weight decay of kernels."""

from typing import Any

import jax
import optax

from jaxddp.config import Config
from jaxddp.sections.layers import longest_match

_NOT_KERNELS = ("cls_token", "pos_embed", "relative_position_bias_table")
"""The class token of a ViT, and position embeddings: arrays of several dimensions that are not kernels."""


def decay_mask(params: Any) -> Any:
    """Return a tree of bool, True for each parameter with weight decay.

    Kernels have weight decay. Biases and scales have none (He et al. 2018, arXiv:1812.01187, section 3.1). As in timm,
    class tokens and position embeddings have none either.
    """
    return jax.tree_util.tree_map_with_path(lambda path, array: is_kernel(_name(path), array.ndim), params)


def is_kernel(name: str, ndim: int) -> bool:
    """Return whether a parameter with this name and number of dimensions has weight decay."""
    return ndim > 1 and name.rpartition("/")[2] not in _NOT_KERNELS


def add_decay(config: Config) -> optax.GradientTransformation:
    """Return a transformation that adds weight decay to the updates of kernels.

    `optimizer.groups` may set the decay of a layer's kernel. Other kernels have the decay `optimizer.weight_decay`.
    """
    default, by_layer = config.optimizer.weight_decay, config.optimizer.layer_settings.decays
    if not by_layer:
        return optax.add_decayed_weights(default, mask=decay_mask)

    def add(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        name = _name(path)
        decay = longest_match(by_layer, name, default) if is_kernel(name, param.ndim) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
