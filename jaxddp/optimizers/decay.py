"""Weight decay: which parameters it applies to, and how strongly."""

from typing import Any

import jax
import optax

from jaxddp.config import Config
from jaxddp.sections.layers import longest

_TABLES = ("cls_token", "pos_embed")
"""A ViT's class token and positions, which have more dimensions than one, but multiply nothing."""


def decayed(params: Any) -> Any:
    """A tree of bool: true for kernels, not for vectors, biases and scales (He et al. 2018, arXiv:1812.01187, 3.1).

    Nor for the tables of a ViT, as in timm.
    """
    return jax.tree_util.tree_map_with_path(lambda path, array: is_kernel(_name(path), array.ndim), params)


def is_kernel(name: str, ndim: int) -> bool:
    """Whether a parameter of this name and so many dimensions is decayed."""
    return ndim > 1 and name.rpartition("/")[2] not in _TABLES


def add_decay(config: Config) -> optax.GradientTransformation:
    """Adds to the updates of kernels their decay, `weight_decay` times the kernel, or what `groups` says of it."""
    usual, own = config.optimizer.weight_decay, config.optimizer.own.decays
    if not own:
        return optax.add_decayed_weights(usual, mask=decayed)

    def add(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        name = _name(path)
        decay = longest(own, name, usual) if is_kernel(name, param.ndim) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
