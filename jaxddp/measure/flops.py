"""Count the floating-point operations of a program in its jaxpr, with the same result on any device.

XLA's own count, `cost_analysis()`, omits the calls of cuDNN and cuBLAS that compute most convolutions and products on a
GPU (https://github.com/jax-ml/jax/issues/16008, https://github.com/jax-ml/jax/issues/22249).

JAX guarantees neither the names of operations nor those of their parameters. `reads_jaxprs` tests whether this release
of JAX has the expected names.
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
"""Floating-point operations by the dtype of the operands, such as {"bfloat16": 24_000_000_000}."""


def count_flops(jaxpr: Any) -> Flops:
    """Count the operations of all matrix products and convolutions of a jaxpr, over all devices of a `shard_map`.

    A multiplication with an addition counts as two. As in XLA, products with padding or with the gaps of a dilated
    input do not count. Elementwise operations do not count either, because memory bandwidth limits them. Every
    iteration of a `scan` counts, and one iteration of a loop of unknown length. Of several branches only the cheapest
    one counts, because the branches of `lax.platform_dependent` compute the same. A `lax.composite` with an attribute
    `multiplications` counts as that number. Recomputation (`jax.checkpoint`) counts twice.
    """
    flops: Flops = Counter()
    for equation in jaxpr.eqns:
        multiplications = _multiplications(equation)
        if multiplications is None:
            flops += _inside(equation)
            continue
        dtype = jnp.result_type(*(operand.aval.dtype for operand in equation.invars))
        if jnp.issubdtype(dtype, jnp.inexact):
            flops[dtype.name] += 2 * multiplications
    return flops


@functools.cache
def reads_jaxprs() -> bool:
    """Test the count on a product in a loop and a convolution. A warning is logged if this JAX gives another result."""

    def known(image: Any, kernel: Any, matrix: Any) -> Any:
        turned, _ = lax.scan(lambda carry, _: (carry @ matrix, None), matrix, length=3)
        return jax.jit(lax.conv_general_dilated, static_argnums=(2, 3))(image, kernel, (1, 1), "SAME"), turned

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 2, 3, 3), (5, 2, 3, 3), (4, 4))]
    # On 3x3 pixels 49 of the 81 taps of a 3x3 kernel meet a pixel.
    expected = {"float32": 2 * (49 * 2 * 5 + 3 * 4**3)}
    # With another JAX, reading a jaxpr may raise any exception.
    with suppress(Exception):
        if count_flops(jax.make_jaxpr(known)(*shapes).jaxpr) == expected:
            return True
    lost = "the operations of a step are not counted, and MFU is unknown"
    private_names.warn_missing("jax", "jaxpr (names of operations and their parameters)", lost)
    return False


def _multiplications(equation: Any) -> int | None:
    """Return the multiplications of one operation; None if it contains other operations or does not multiply."""
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        case "conv_general_dilated":
            return _convolution(equation)
        case "composite":
            # JAX stores an attribute as a flattened tree, here with one leaf.
            attributes = {name: leaves for name, leaves, *_ in equation.params["attributes"]}
            return int(attributes["multiplications"][0]) if "multiplications" in attributes else None
    return None


def _inside(equation: Any) -> Flops:
    """Count the operations inside an operation that contains jaxprs."""
    bodies = [count_flops(getattr(body, "jaxpr", body)) for body in jaxprs_in(equation.params.values())]
    if equation.primitive.name == "cond":
        return min(bodies, key=lambda body: body.total())
    times = {"scan": lambda params: params["length"], "shard_map": lambda params: params["mesh"].size}
    repeats = times.get(equation.primitive.name, lambda params: 1)(equation.params)
    return Counter({dtype: repeats * flops for dtype, flops in sum(bodies, Counter()).items()})


def jaxprs_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an operation, closed or open, also those in tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from jaxprs_in(value)
        elif hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value


def operations_in(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a jaxpr, closed or open, including those of nested jaxprs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jaxprs_in(equation.params.values()):
            yield from operations_in(inner)


def _convolution(equation: Any) -> int:
    """Return the multiplications of `conv_general_dilated`."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = (operand.aval.shape for operand in equation.invars)
    out = equation.outvars[0].aval.shape
    total = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    for axis, (stride, (low, _), spread, holes) in enumerate(
        zip(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True), 2
    ):
        inputs, taps = image[numbers.lhs_spec[axis]], kernel[numbers.rhs_spec[axis]]
        outputs = np.arange(out[numbers.out_spec[axis]])[:, None]
        # The input positions that the kernel's taps read, in the dilated input without padding.
        at = stride * outputs + holes * np.arange(taps) - low
        total *= int(((at >= 0) & (at <= (inputs - 1) * spread) & (at % spread == 0)).sum())
    return total
