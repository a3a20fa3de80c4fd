"""Pass the extra arguments `value` and `grad` to optimizers that take them (`GradientTransformationExtraArgs`)."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxddp.core.errors import InputError
from jaxddp.core.wording import kind_of

_MISSING = re.compile(r"missing \d+ required (?:keyword-only|positional) argument")


def call_update(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    value: Callable[[], jax.Array],
    grad: Any,
) -> tuple[Any, Any]:
    """Call an optimizer's `update`, and return the updates and its next state.

    An `optax.GradientTransformationExtraArgs` also gets `value` and `grad` as keyword arguments. The program computes
    the loss only if the optimizer uses it.

    Args:
        value: a function that returns the mean loss over the global batch, float[], the same on every device.
        grad: the averaged gradient, before any optional part of the step changes it.

    Raises:
        InputError: the optimizer needs another argument, such as the `value_fn` of a line search.
    """
    try:
        if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
            return _pair(optimizer.update(grads, opt_state, params))
        shape = jax.eval_shape(value)
        # This placeholder replaces a loss that the optimizer does not use. Otherwise JAX would keep the computation of
        # the loss in the program.
        loss: Any = np.full(shape.shape, np.nan, shape.dtype)
        if _uses_loss(optimizer, shape, grads, opt_state, params, grad):
            loss = value()
        return _pair(optimizer.update(grads, opt_state, params, value=loss, grad=grad))
    except TypeError as error:
        if not _MISSING.search(str(error)):
            raise
        raise InputError(
            f"optimizer: {error}; the step passes only value (the mean loss) and grad (its gradient) to an "
            "optax.GradientTransformationExtraArgs; choose an optimizer that needs no other argument"
        ) from error


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"optimizer: its update returned {kind_of(result)}; return a pair (updates, state)")
    return result


def _uses_loss(optimizer: Any, value: Any, grads: Any, opt_state: Any, params: Any, grad: Any) -> bool:
    """Return whether an optimizer's update depends on the loss.

    Many optimizers, such as `optax.chain`, accept the loss and ignore it.
    """

    def update(loss: jax.Array, grads: Any, opt_state: Any, params: Any, grad: Any) -> Any:
        return optimizer.update(grads, opt_state, params, value=loss, grad=grad)

    traced = jax.make_jaxpr(update)(value, grads, opt_state, params, grad).jaxpr
    loss = traced.invars[0]
    return any(used is loss for used in [*traced.outvars, *(operand for eqn in traced.eqns for operand in eqn.invars)])
