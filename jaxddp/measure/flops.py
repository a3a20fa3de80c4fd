"""The floating-point operations of a program, counted in its jaxpr, and so the same on any device.

XLA's own count, `cost_analysis()`, leaves out the calls of cuDNN and cuBLAS that most convolutions and products become
on a GPU (https://github.com/jax-ml/jax/issues/16008, https://github.com/jax-ml/jax/issues/22249).

JAX promises neither the names of operations nor those of their parameters: `reads_jaxprs` tries them.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxddp.core.private_names as private_names

Flops = Counter[str]
"""Floating-point operations by the dtype of what is multiplied: {"bfloat16": 24_000_000_000}."""


def count_flops(jaxpr: Any) -> Flops:
    """The operations of all matrix products and convolutions of a jaxpr, over all devices of a `shard_map`.

    A multiplication with an addition is two. As in XLA, products with padding or the gaps of a dilated input are not
    counted; nor is elementwise work, which is bound by memory. A `scan` counts each of its turns, a loop of unknown
    length one turn. Of branches the cheapest counts: those of `lax.platform_dependent` compute the same. A
    `lax.composite` with an attribute `multiplications` counts as so many. What is computed twice to save memory
    (`jax.checkpoint`) is counted twice.
    """
    found: Flops = Counter()
    for equation in jaxpr.eqns:
        multiplications = _multiplications(equation)
        if multiplications is None:
            found += _inside(equation)
            continue
        dtype = jnp.result_type(*(operand.aval.dtype for operand in equation.invars))
        if jnp.issubdtype(dtype, jnp.inexact):
            found[dtype.name] += 2 * multiplications
    return found


@functools.cache
def reads_jaxprs() -> bool:
    """Whether a product in a loop and a convolution of this JAX count as by hand; where they do not, a line says so."""

    def known(image: Any, kernel: Any, matrix: Any) -> Any:
        turned, _ = lax.scan(lambda carry, _: (carry @ matrix, None), matrix, length=3)
        return jax.jit(lax.conv_general_dilated, static_argnums=(2, 3))(image, kernel, (1, 1), "SAME"), turned

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 2, 3, 3), (5, 2, 3, 3), (4, 4))]
    # On 3x3 pixels 49 of the 81 taps of a 3x3 kernel meet a pixel.
    expected = {"float32": 2 * (49 * 2 * 5 + 3 * 4**3)}
    # What another JAX says of itself may raise anything.
    with suppress(Exception):
        if count_flops(jax.make_jaxpr(known)(*shapes).jaxpr) == expected:
            return True
    lost = "what a step computes is not counted, and MFU not known"
    private_names.say_lost("jax", "jaxpr (names of operations and their parameters)", lost)
    return False


def _multiplications(equation: Any) -> int | None:
    """Of one operation; None of one that is made of others."""
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        case "conv_general_dilated":
            return _convolution(equation)
        case "composite":
            # An attribute is kept as a flattened tree, here of one leaf.
            told = {name: leaves for name, leaves, *_ in equation.params["attributes"]}
            return int(told["multiplications"][0]) if "multiplications" in told else None
    return None


def _inside(equation: Any) -> Flops:
    """What an operation does that is made of others."""
    bodies = [count_flops(getattr(body, "jaxpr", body)) for body in jaxprs_in(equation.params.values())]
    if equation.primitive.name == "cond":
        return min(bodies, key=lambda body: body.total())
    times = {"scan": lambda given: given["length"], "shard_map": lambda given: given["mesh"].size}
    turns = times.get(equation.primitive.name, lambda given: 1)(equation.params)
    return Counter({dtype: turns * flops for dtype, flops in sum(bodies, Counter()).items()})


def jaxprs_in(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an operation, closed or not, alone or several in a tuple."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from jaxprs_in(value)
        elif hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value


def operations_in(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, closed or not, and of those in it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jaxprs_in(equation.params.values()):
            yield from operations_in(inner)


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
