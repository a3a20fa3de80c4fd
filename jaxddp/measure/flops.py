"""Count the floating-point operations of a program from its jaxpr, independently of the device.

XLA's own count, `cost_analysis()`, omits the calls of cuDNN and cuBLAS that compute most convolutions and products on a
GPU (https://github.com/jax-ml/jax/issues/16008, https://github.com/jax-ml/jax/issues/22249).

The names of operations and of their parameters may change with a release of JAX. `can_read_jaxprs` tests whether the
installed release has the expected names.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxddp.core.libraries as libraries

Flops = Counter[str]
"""Floating-point operations by the dtype of the operands, such as {"bfloat16": 24_000_000_000}."""

Origin = tuple[frozenset[int], int | None]
"""The numbers of the inputs that a value of a program depends on, and of the input that it equals, if any."""
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call"})
"""The operations that call one jaxpr with their own operands."""


def count_flops(jaxpr: Any) -> Flops:
    """Count the operations of all matrix products and convolutions of a jaxpr, over all devices of a `shard_map`.

    A multiplication with an addition counts as two operations. As in XLA, products with padding or with the gaps of a
    dilated input do not count. Elementwise operations do not count, because memory bandwidth limits them. All
    iterations of a `scan` count, but only one iteration of a `while_loop`, whose length is unknown. Of the branches of
    a `cond`, only the cheapest counts, because the branches of `lax.platform_dependent` compute the same result. A
    `lax.composite` with an attribute `multiplications` counts as that number. Operations that `jax.checkpoint` repeats
    count twice.
    """
    flops: Flops = Counter()
    for equation in jaxpr.eqns:
        multiplications = _multiplications(equation)
        if multiplications is None:
            flops += _nested_flops(equation)
            continue
        dtype = jnp.result_type(*(operand.aval.dtype for operand in equation.invars))
        if jnp.issubdtype(dtype, jnp.inexact):
            flops[dtype.name] += 2 * multiplications
    return flops


@functools.cache
def can_read_jaxprs() -> bool:
    """Return whether `count_flops` gives the known count of a small program. Log a warning if it does not."""

    def sample_program(image: Any, kernel: Any, matrix: Any) -> Any:
        product, _ = lax.scan(lambda carry, _: (carry @ matrix, None), matrix, length=3)
        return jax.jit(lax.conv_general_dilated, static_argnums=(2, 3))(image, kernel, (1, 1), "SAME"), product

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 2, 3, 3), (5, 2, 3, 3), (4, 4))]
    # On 3x3 pixels with padding, 49 of the 81 products of a 3x3 kernel have a pixel as operand.
    expected = {"float32": 2 * (49 * 2 * 5 + 3 * 4**3)}
    # If the names have changed, `count_flops` may raise any exception.
    with suppress(Exception):
        if count_flops(jax.make_jaxpr(sample_program)(*shapes).jaxpr) == expected:
            return True
    lost = "the operations of a step are not counted, and MFU is unknown"
    libraries.warn_missing("jax", "jaxpr (names of operations and their parameters)", lost)
    return False


def _multiplications(equation: Any) -> int | None:
    """Return the multiplications of an operation; None if it has no multiplications or contains jaxprs."""
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        case "conv_general_dilated":
            return _convolution(equation)
        case "composite":
            # JAX stores an attribute as a flattened tree; the attribute `multiplications` has one leaf.
            attributes = {name: leaves for name, leaves, *_ in equation.params["attributes"]}
            return int(attributes["multiplications"][0]) if "multiplications" in attributes else None
    return None


def _nested_flops(equation: Any) -> Flops:
    """Count the operations in the jaxprs that an operation contains."""
    bodies = [count_flops(getattr(body, "jaxpr", body)) for body in jaxprs_in(equation.params.values())]
    if equation.primitive.name == "cond":
        return min(bodies, key=lambda body: body.total())
    repetitions = {"scan": lambda params: params["length"], "shard_map": lambda params: params["mesh"].size}
    repeats = repetitions.get(equation.primitive.name, lambda params: 1)(equation.params)
    return Counter({dtype: repeats * flops for dtype, flops in sum(bodies, Counter()).items()})


def jaxprs_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the jaxprs, closed or open, in the parameters of an operation, and in nested tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from jaxprs_in(value)
        elif hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value


def operations_in(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a jaxpr, closed or open, and of its nested jaxprs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jaxprs_in(equation.params.values()):
            yield from operations_in(inner)


def origins(jaxpr: Any, inputs: Sequence[Origin] | None = None) -> list[Origin]:
    """Return the origin of each output of a jaxpr: the inputs it depends on, and the input it equals, if any."""
    known = inputs or [(frozenset({index}), index) for index in range(len(jaxpr.invars))]
    known_origins: dict[Any, Origin] = dict(zip(jaxpr.invars, known, strict=True))
    unknown: Origin = (frozenset(), None)

    def origin(variable: Any) -> Origin:
        return unknown if hasattr(variable, "val") else known_origins.get(variable, unknown)

    for equation in jaxpr.eqns:
        operands = [origin(variable) for variable in equation.invars]
        bodies = [getattr(body, "jaxpr", body) for body in jaxprs_in(equation.params.values())]
        if len(bodies) == 1 and equation.primitive.name in _CALLS and len(bodies[0].invars) == len(operands):
            results = origins(bodies[0], operands)
        else:
            results = [(frozenset().union(*(sources for sources, _ in operands)), None)] * len(equation.outvars)
        known_origins |= zip(equation.outvars, results, strict=True)
    return [origin(variable) for variable in jaxpr.outvars]


def _convolution(equation: Any) -> int:
    """Return the multiplications of `conv_general_dilated`."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = (operand.aval.shape for operand in equation.invars)
    out = equation.outvars[0].aval.shape
    total = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    for axis, (stride, (low, _), input_dilation, kernel_dilation) in enumerate(
        zip(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True), 2
    ):
        inputs, taps = image[numbers.lhs_spec[axis]], kernel[numbers.rhs_spec[axis]]
        outputs = np.arange(out[numbers.out_spec[axis]])[:, None]
        # The positions in the dilated input, without padding, of the operands of each output.
        input_positions = stride * outputs + kernel_dilation * np.arange(taps) - low
        total *= int(
            (
                (input_positions >= 0)
                & (input_positions <= (inputs - 1) * input_dilation)
                & (input_positions % input_dilation == 0)
            ).sum()
        )
    return total
