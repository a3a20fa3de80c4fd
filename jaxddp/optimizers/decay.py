"""SGD with momentum and AdamW, both with weight decay, and which parameters it applies to."""

from typing import Any

import jax
import optax

from jaxddp.config import Config
from jaxddp.registry import OPTIMIZERS

_TABLES = ("cls_token", "pos_embed")
"""A ViT's class token and positions, which have more dimensions than one, but multiply nothing."""


def decayed(params: Any) -> Any:
    """A tree of bool: true for kernels, not for vectors, biases and scales (He et al. 2018, arXiv:1812.01187, 3.1).

    Nor for the tables of a ViT, as in timm.
    """

    def is_kernel(path: Any, array: Any) -> bool:
        return array.ndim > 1 and jax.tree_util.keystr(path[-1:], simple=True) not in _TABLES

    return jax.tree_util.tree_map_with_path(is_kernel, params)


@OPTIMIZERS.add("momentum")
def momentum(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """SGD as the ResNets were trained: weight decay is added to the gradient."""
    settings = config.optimizer
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay, mask=decayed),
        optax.sgd(learning_rate, momentum=settings.momentum, nesterov=settings.nesterov),
    )


@OPTIMIZERS.add("adamw")
def adamw(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    settings = config.optimizer
    return optax.adamw(
        learning_rate, b1=settings.momentum, b2=settings.beta2, weight_decay=settings.weight_decay, mask=decayed
    )
