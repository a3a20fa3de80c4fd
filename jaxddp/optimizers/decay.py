"""Weight decay of kernels, and the trust ratios of LARS and LAMB."""

from typing import Any

import jax
import optax

from jaxddp.config import Config
from jaxddp.optimizers.kernels import BY_NAME, Kernel, Kernels, name_of
from jaxddp.sections.layers import longest_match


def decay_mask(params: Any) -> Any:
    """Return a tree of bool, True for each parameter with weight decay, by its name and its rank.

    Kernels have weight decay. Biases and scales have none (He et al. 2018, arXiv:1812.01187, section 3.1). As in timm,
    class tokens and position embeddings have none either.
    """
    return BY_NAME.mask(params)


def add_decay(config: Config, kernels: Kernels) -> optax.GradientTransformation:
    """Return a transformation that adds weight decay to the updates of kernels.

    `optimizer.groups` may set the decay of a layer's kernel. Other kernels have the decay `optimizer.weight_decay`.
    """
    default, by_layer = config.optimizer.weight_decay, config.optimizer.layer_settings.decays
    if not by_layer:
        return optax.add_decayed_weights(default, mask=kernels.mask)

    def add(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        name = name_of(path)
        decay = longest_match(by_layer, name, default) if kernels.get(name, param.shape) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def scale_kernels(kernels: Kernels, coefficient: float = 1.0, epsilon: float = 0.0) -> optax.GradientTransformation:
    """Return a transformation that multiplies each kernel's update by `coefficient` * |kernel| / (|update| + epsilon).

    Each layer of a stack (`nn.scan`, `nn.vmap`) has norms of its own.
    """
    ratio = optax.scale_by_trust_ratio(trust_coefficient=coefficient, eps=epsilon)

    def scale(kernel: Kernel | None, update: jax.Array, param: jax.Array) -> jax.Array:
        if kernel is None:
            return update

        def layer(update: jax.Array, param: jax.Array) -> Any:
            return ratio.update(update, optax.EmptyState(), param)[0]

        for axis in kernel.stacked:
            layer = jax.vmap(layer, axis, axis)
        return layer(update, param)

    return optax.stateless(lambda updates, params: kernels.map(scale, updates, params))
