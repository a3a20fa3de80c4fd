"""What an optimizer is given beside the gradients, where it asks: optax's `GradientTransformationExtraArgs`."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxddp.core.errors import InputError
from jaxddp.core.wording import kind_of

_MISSING = re.compile(r"missing \d+ required (?:keyword-only|positional) argument")


def updated(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    value: Callable[[], jax.Array],
    grad: Any,
) -> tuple[Any, Any]:
    """The updates of an optimizer and its next state.

    One that is an `optax.GradientTransformationExtraArgs` is also given two arguments by keyword; what it does not look
    at is not in the program.

    Args:
        value: gives the mean loss over the global batch, float[], the same on every device.
        grad: the averaged gradient, as it was before any part of the step changed it.

    Raises:
        InputError: the optimizer asks for more, such as a line search for `value_fn`.
    """
    try:
        if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
            return _pair(optimizer.update(grads, opt_state, params))
        shape = jax.eval_shape(value)
        # What nobody looks at, in place of the computation of a loss: JAX keeps what has no use in what it traces.
        loss: Any = np.full(shape.shape, np.nan, shape.dtype)
        if _looks_at(optimizer, shape, grads, opt_state, params, grad):
            loss = value()
        return _pair(optimizer.update(grads, opt_state, params, value=loss, grad=grad))
    except TypeError as error:
        if not _MISSING.search(str(error)):
            raise
        raise InputError(
            f"optimizer: {error}; a step gives an optax.GradientTransformationExtraArgs value, the mean loss, and "
            "grad, its gradient, and no more; choose one that needs no other"
        ) from error


def _pair(made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(f"optimizer: its update returned {kind_of(made)}; return a pair (updates, state)")
    return made


def _looks_at(optimizer: Any, value: Any, grads: Any, opt_state: Any, params: Any, grad: Any) -> bool:
    """Whether a loss has any use in an optimizer's program. Most take it, as `optax.chain` does, and drop it."""

    def update(loss: jax.Array, grads: Any, opt_state: Any, params: Any, grad: Any) -> Any:
        return optimizer.update(grads, opt_state, params, value=loss, grad=grad)

    traced = jax.make_jaxpr(update)(value, grads, opt_state, params, grad).jaxpr
    loss = traced.invars[0]
    return any(used is loss for used in [*traced.outvars, *(each for eqn in traced.eqns for each in eqn.invars)])
