"""The floating-point operations that a program is made of, counted in its jaxpr.

XLA has a count of its own, `cost_analysis()` of a compiled program, but none to build a utilization on: on a GPU most
convolutions and products become calls of cuDNN and cuBLAS, of which XLA's count knows nothing
(https://github.com/jax-ml/jax/issues/16008, https://github.com/jax-ml/jax/issues/22249), and its count before
compilation does not exist there. This one is the same on any device.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

Flops = Counter[str]
"""Floating-point operations by the dtype of what is multiplied: {"bfloat16": 24_000_000_000}."""


def count_flops(jaxpr: Any) -> Flops:
    """The operations of all matrix products and convolutions of a jaxpr, over all devices of a `shard_map`.

    A multiplication with an addition is two. What a convolution would multiply with its padding, or between the
    elements of a dilated input, is not counted, as XLA does not. Elementwise work, which is bound by memory, is not
    counted either. A `scan` counts each of its turns, a loop whose turns are not known one turn, of branches the
    cheapest: those of `lax.platform_dependent` compute the same, and one may do more than the mathematics needs. What
    is computed twice to save memory (`jax.checkpoint`) is counted twice.
    """
    found: Flops = Counter()
    for equation in jaxpr.eqns:
        rule = {"dot_general": _product, "conv_general_dilated": _convolution}.get(equation.primitive.name)
        if rule is None:
            found += _inside(equation)
            continue
        dtype = jnp.result_type(*(operand.aval.dtype for operand in equation.invars))
        if jnp.issubdtype(dtype, jnp.inexact):
            found[dtype.name] += 2 * rule(equation)
    return found


def _inside(equation: Any) -> Flops:
    """What an operation does that is made of others."""
    bodies = [count_flops(body) for body in _jaxprs(equation.params.values())]
    if equation.primitive.name == "cond":
        return min(bodies, key=lambda body: body.total())
    times = {"scan": lambda given: given["length"], "shard_map": lambda given: given["mesh"].size}
    turns = times.get(equation.primitive.name, lambda given: 1)(equation.params)
    return Counter({dtype: turns * flops for dtype, flops in sum(bodies, Counter()).items()})


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an operation, closed or not, alone or several in a tuple."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(body := getattr(value, "jaxpr", value), "eqns"):
            yield body


def _product(equation: Any) -> int:
    """Multiplications of `dot_general`."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    """Multiplications of `conv_general_dilated`."""
    given, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = (operand.aval.shape for operand in equation.invars)
    out = equation.outvars[0].aval.shape
    total = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    for axis, (stride, (low, _), spread, holes) in enumerate(
        zip(given["window_strides"], given["padding"], given["lhs_dilation"], given["rhs_dilation"], strict=True), 2
    ):
        inputs, taps = image[numbers.lhs_spec[axis]], kernel[numbers.rhs_spec[axis]]
        outputs = np.arange(out[numbers.out_spec[axis]])[:, None]
        # Where a tap meets the input of an output: with its padding and the holes of its dilation, from 0.
        at = stride * outputs + holes * np.arange(taps) - low
        total *= int(((at >= 0) & (at <= (inputs - 1) * spread) & (at % spread == 0)).sum())
    return total
