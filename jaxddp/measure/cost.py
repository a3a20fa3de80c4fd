"""The cost of a compiled program: its floating-point operations, its memory on a device, and peak rates of devices.

Operations are counted from a program's jaxpr, independently of the device. XLA's own count, `cost_analysis()`, omits
the calls of cuDNN and cuBLAS that compute most convolutions and products on a GPU
(https://github.com/jax-ml/jax/issues/16008, https://github.com/jax-ml/jax/issues/22249). The names of operations and of
their parameters may change with a release of JAX. `digest` identifies a program by its jaxpr.
"""

import csv
import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxddp.core.libraries as libraries
from jaxddp.mesh import AXIS

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BYTES = [f"{part}_size_in_bytes" for part in ("argument", "output", "alias", "temp")]


@dataclass(frozen=True)
class Cost:
    """The cost of one execution of a program."""

    flops_of: Mapping[str, int]
    """Floating-point operations by dtype, summed over all devices of all processes; see `count_flops`."""
    memory: Any
    """XLA's `CompiledMemoryStats`, in bytes on each device; None if the backend does not report them."""

    @property
    def flops(self) -> int:
        """Return the number of floating-point operations of all devices."""
        return sum(self.flops_of.values())

    def per_step(self, steps: int) -> "Cost":
        """Return the cost of one step of a program with `steps` steps. All steps use the same memory."""
        return replace(self, flops_of={dtype: flops // steps for dtype, flops in self.flops_of.items()})

    def utilization(self, seconds: float, num_devices: int, device_kind: str) -> float | None:
        """Return the model FLOP utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

        This is the time that the devices would need at their peak rate, divided by `seconds`. The result is None if a
        peak rate is unknown or no operations were counted.
        """
        rates = {dtype: peak(device_kind, dtype) for dtype in self.flops_of}
        seconds_at_peak = sum(self.flops_of[dtype] / rate for dtype, rate in rates.items() if rate is not None)
        if None in rates.values():
            return None
        return seconds_at_peak / (num_devices * seconds) if seconds_at_peak else None


class MeanCost:
    """The mean cost of the steps of a run, whose costs may differ."""

    def __init__(self) -> None:
        self._steps, self._flops_of, self._memory = 0, Counter[str](), None

    def add(self, steps: int, cost: Cost) -> None:
        """Add `steps` steps, each with this cost."""
        self._steps, self._memory = self._steps + steps, cost.memory
        self._flops_of.update({dtype: steps * flops for dtype, flops in cost.flops_of.items()})

    def mean(self) -> Cost | None:
        """Return the mean cost of a step, with the memory of the last step; None without a step."""
        return Cost(self._flops_of, self._memory).per_step(self._steps) if self._steps else None


def compile_with_cost(function: Any, *arguments: Any) -> tuple[Any, Cost]:
    """Compile a jitted function for arguments, or for their shapes; return the executable and its cost."""
    return compile_traced(function.trace(*arguments))


def compile_traced(traced: Any) -> tuple[Any, Cost]:
    """Compile a traced function; return the executable and its cost."""
    compiled = traced.lower().compile()
    return compiled, Cost(flops_by_dtype(traced.jaxpr), _memory_of(compiled))


def flops_by_dtype(jaxpr: Any) -> dict[str, int]:
    """Return the result of `count_flops`, the largest number first; empty if JAX changes the names in jaxprs."""
    try:
        return dict(count_flops(jaxpr).most_common())
    # If JAX changes the names of operations or of their parameters, this may raise any exception.
    except Exception:
        lost = "the operations of a step are not counted, and MFU is unknown"
        libraries.warn_missing("jax", "jaxpr (names of operations and their parameters)", lost)
        return {}


def _memory_of(compiled: Any) -> Any:
    """Return XLA's `CompiledMemoryStats`; None if there are none, or if expected fields are missing."""
    stats = compiled.memory_analysis()
    if stats is None or all(hasattr(stats, name) for name in _BYTES):
        return stats
    lost = "the memory that a step needs is unknown, and not compared with the available memory"
    libraries.warn_missing("jax", "Compiled.memory_analysis()", lost)
    return None


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
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    windows = zip(*(params[name] for name in names), strict=True)
    for axis, (stride, (low, _), input_dilation, kernel_dilation) in enumerate(windows, 2):
        inputs, taps = image[numbers.lhs_spec[axis]], kernel[numbers.rhs_spec[axis]]
        outputs = np.arange(out[numbers.out_spec[axis]])[:, None]
        # The positions in the dilated input, without padding, of the operands of each output.
        input_positions = stride * outputs + kernel_dilation * np.arange(taps) - low
        inside = (input_positions >= 0) & (input_positions <= (inputs - 1) * input_dilation)
        total *= int((inside & (input_positions % input_dilation == 0)).sum())
    return total


@functools.cache
def _peaks() -> list[dict[str, str]]:
    """Return the peak rates of GPUs and TPUs in `peaks.csv`, in 10^12 operations per second; "" for an unknown rate.

    An entry matches if the device kind contains all its words. The first match is used. The rates are from the data
    sheets of NVIDIA and Google.

    The rates of GPUs are those of the tensor cores without sparsity. (Most sheets print the rates with sparsity, which
    are twice as high.) On Ampere and later, the rate of float32 is that of TF32, JAX's default precision on these GPUs.
    On older GPUs, it is that of FP32. The tensor cores of Volta and Turing do not support bfloat16, so these GPUs have
    no bfloat16 rate.

    The data sheets are NVIDIA's "V100 GPU Accelerator" and "V100S", "T4", "A10", "A10G" (for AWS), "L4", "L40S",
    "A100 80GB", "H100" (SXM and NVL; PCIe in the edition of 2022), "H200" (SXM and NVL), and "HGX B200" (whose rate for
    eight GPUs is divided by 8).

    On TPUs, JAX's default precision of float32 multiplies in bfloat16, so both have the same rate. JAX counts a chip of
    TPU v2 and v3 as two devices, and a chip of later versions as one. The rates are the peaks per chip in Google
    Cloud's pages "TPU v2", "TPU v3", "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e". The "lite" version of TPU v4 is not
    a product of Google Cloud, and no peak of it is known.
    """
    with Path(__file__).with_name("peaks.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def peak(device_kind: str, dtype: str) -> float | None:
    """Return the peak floating-point operations per second of one device for a dtype; None if unknown.

    Args:
        device_kind: JAX's name, such as "NVIDIA H200", "NVIDIA A100-SXM4-80GB" or "TPU v5 lite", which is TPU v5e.
    """
    words = set(re.split(r"[\s-]+", device_kind.upper()))
    # The name of a MIG slice contains the name of its GPU, but a slice is slower.
    if "MIG" in words:
        return None
    rates = next((row for row in _peaks() if words.issuperset(row["kind"].split())), {})
    return float(rates[dtype]) * 1e12 if rates.get(dtype) else None


def digest(function: Callable[..., Any], *arguments: Any) -> str:
    """Return 12 hex digits of the SHA-256 of a function's jaxpr and all its constants."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    traced = jax.make_jaxpr(function, axis_env=[(AXIS, 1)])(*abstract)
    found = hashlib.sha256(_ADDRESS.sub("", str(traced)).encode())
    # A printed jaxpr omits the constants, and the middle of a large literal.
    for constant in _constants(traced):
        if jnp.issubdtype(jnp.result_type(constant), jax.dtypes.prng_key):  # A literal may be a bool of Python.
            constant = jax.random.key_data(constant)
        found.update(np.ascontiguousarray(constant).tobytes())
    return found.hexdigest()[:12]


def _constants(closed: Any) -> Iterator[Any]:
    """Yield the constants and literals of a jaxpr, and of the jaxprs inside its operations."""
    yield from (constant for constant in getattr(closed, "consts", ()) if hasattr(constant, "dtype"))
    for equation in getattr(closed, "jaxpr", closed).eqns:
        yield from (operand.val for operand in equation.invars if hasattr(operand, "val"))
        for inner in jaxprs_in(equation.params.values()):
            yield from _constants(inner)
