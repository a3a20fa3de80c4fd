"""Gradient checkpointing: the backward pass computes activations again, so that the forward pass keeps fewer of them.

Each block has its own `jax.checkpoint`. With a single one for the whole network, XLA's scheduler for several GPUs would
compute the activations of all blocks again before the first gradient.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost" (arXiv:1604.06174).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.config.layers import ADDED
from jaxddp.core.errors import InputError, Key
from jaxddp.models.interface import Model

Remat = Literal["none", "blocks", "dots"]


def rematerialized(model: Model, remat: Remat) -> Callable[..., Any]:
    """Return `model.apply` in training, whose derivative computes again what the forward pass does not keep.

    Args:
        remat: what the forward pass keeps: everything, the inputs of blocks, or also the results of matrix products and
            convolutions. The results of collectives are kept too, so that no statistics are exchanged twice.

    Raises:
        InputError: raised by the returned function for "blocks" if the model calls no Linen module that is a block.
    """
    apply, policies = functools.partial(model.apply, train=True), jax.checkpoint_policies
    if remat == "none":
        return apply
    kept = policies.dots_saveable if remat == "dots" else policies.nothing_saveable
    # A convolution that jaxddp computes itself is called by `custom_vmap`; see `_as_composite`.
    names = ("psum", "custom_vmap_call") if remat == "dots" else "psum"
    kept = policies.save_from_both_policies(kept, lambda operation, *_, **__: operation.name.startswith(names))

    def call(params: Any, model_state: Any, *more: Any, **keywords: Any) -> Any:
        # Flax's derivative of a block takes no gradient of the state, which an earlier pass may have updated.
        arguments = jax.lax.stop_gradient(model_state), *more
        entered, blocks = set[str](), set(block_names(params) if isinstance(params, Mapping) else ())

        def checkpoint(function: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path, module = "/".join(context.module.path), context.module
            if context.method_name != "__call__" or path not in blocks - entered:
                return function(*args, **kwargs)
            leaves, structure = jax.tree.flatten((args, kwargs))
            arrays = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

            def block(module: nn.Module, arrays: Mapping[int, jax.Array]) -> Any:
                entered.add(path)
                args, kwargs = structure.unflatten([arrays.get(number, leaf) for number, leaf in enumerate(leaves)])
                return module(*args, **kwargs)

            once = nn.remat(block, policy=kept)
            # An objective may add values that blocks store or sow, and `_backward` has no gradient of them.
            if not (isinstance(model_state, Mapping) and {"batch_stats"}.issuperset(model_state)):
                return once(module, arrays)
            return nn.custom_vjp(block, functools.partial(nn.vjp, once), _backward)(module, arrays)

        with nn.intercept_methods(checkpoint):
            result = apply(params, *arguments, **keywords)
        if entered:
            return result
        if remat == "dots":
            return jax.checkpoint(apply, policy=kept)(params, *arguments, **keywords)
        problem = ": the network has no Linen module that consists of modules"
        raise InputError(Key("train.remat", "blocks"), problem, advice="give dots")

    return call


def block_names(params: Mapping[str, Any]) -> list[str]:
    """Return the paths of the blocks of a network: its direct modules that consist of modules.

    If there is only one such module, the blocks of this module are returned.
    """
    modules = {name: tree for name, tree in params.items() if isinstance(tree, Mapping) and name not in ADDED}
    inner = [name for name, tree in modules.items() if any(isinstance(each, Mapping) for each in tree.values())]
    if len(inner) != 1:
        return inner
    return [f"{inner[0]}/{name}" for name in block_names(params[inner[0]])] or inner


def _backward(vjp: Any, grads: Any) -> Any:
    """Differentiate a block after the next block, and return its input's gradient after those of its parameters.

    Without the second rule, XLA's scheduler for several GPUs puts the gradients of kernels off, which read activations.
    """
    params, arrays = _after(vjp, grads)(grads)
    return params, _after(arrays, params)


def _after(tree: Any, previous: Any) -> Any:
    """Return a tree whose arrays XLA computes after the arrays of `previous`. A CPU's compiler removes barriers."""
    leaves = [leaf.ravel()[0] for leaf in jax.tree.leaves(previous) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    # The condition is never true, but XLA cannot derive this.
    is_never = functools.reduce(jnp.logical_or, [leaf > jnp.inf for leaf in leaves], jnp.zeros((), bool))
    return jax.tree.map(
        lambda leaf: jnp.where(is_never, 0, leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, tree
    )
