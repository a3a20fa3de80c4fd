"""The three matrix products of a 1x1 convolution between two batch norms, as Pallas kernels for a GPU.

Each kernel reads a norm's input and normalizes it in registers, so that neither the normalized images nor the gradient
with respect to the convolution's output are written to memory. In registers it also sums the statistics that the
following norm needs. Images are matrices [M, K] or [M, F] with a row for each pixel; the kernel is [K, F].
Accumulation is in float32 or wider. On a GPU float32 is rounded to TF32 before products, as in the library.

M, K and F are arbitrary: a block that extends past the end of an array is masked. The sizes of blocks fit into the
registers of 8 warps; other sizes were not timed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from benchmarks.fused.blocks import Block, block_length, load, store, zero_outside
from jaxddp.models.ops.batch_norm import Pair

# Sizes of a result's block, and the depth of one product.
ROWS, COLUMNS, DEPTH = 128, 128, 64
MULTIPROCESSORS = 132
"""Multiprocessors of an H200. The long sums of the kernel's gradient are split until each has a program."""
LEAST_STEPS = 4
"""Minimum blocks of rows that a program of the kernel's gradient sums, which limits the number of partial sums."""
COMPILER = plgpu.CompilerParams(num_warps=8, num_stages=3)


class Norm(NamedTuple):
    """The norm (x - mean) * multiplier + bias; each field is float32[C]."""

    mean: jax.Array
    multiplier: jax.Array
    bias: jax.Array


class NormGradient(NamedTuple):
    """The gradient with respect to a norm's input: multiplier * (gradient - shift - (x - mean) * slope).

    `shift` and `slope` are float32[C].
    """

    norm: Norm
    shift: jax.Array
    slope: jax.Array


class Incoming(NamedTuple):
    """The gradient with respect to the output of the norm after a convolution, and the convolution's output y."""

    gradient: jax.Array
    y: jax.Array
    norm: NormGradient


def convolve(
    x: jax.Array, before: Norm | None, kernel: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, Pair]:
    """Compute y = relu(normalized(x)) @ kernel, [M, F], and the sums of y and of its squares over rows, float32[F].

    Args:
        x: [M, K].
        before: The normalization of x, followed by a ReLU. If None, x is used unchanged.
        interpret: Whether to compute by plain operations, on any platform.
    """
    (pixels, _), features = x.shape, kernel.shape[1]
    blocks = pl.cdiv(pixels, block_length(pixels, ROWS))
    sums = _result_shape(x, (blocks, features), _wide_dtype(x))
    y, *partial = pl.pallas_call(
        _multiply,
        out_shape=(_result_shape(x, (pixels, features)), sums, sums),
        grid=(pl.cdiv(features, block_length(features, COLUMNS)), blocks),
        compiler_params=COMPILER,
        interpret=interpret,
        name="fused_convolution",
    )(x, before, kernel)
    total, squares = (each.sum(0) for each in partial)
    return y, (total, squares)


def image_gradient(
    incoming: Incoming,
    kernel: jax.Array,
    inputs: tuple[jax.Array, Norm] | None,
    *,
    relu: bool,
    interpret: bool = False,
) -> tuple[jax.Array, Any]:
    """Compute the gradient, [M, K], with respect to the input of `convolve` after its normalization, before its ReLU.

    Args:
        inputs: x and its norm, or None without a norm.
        relu: Whether a ReLU follows the norm of y.

    Returns:
        The gradient g; and the sums over rows of g and of g * (x - mean), float32[K] each, or () without a norm.
    """
    y, depth = incoming.y, kernel.shape[0]
    pixels = len(y)
    blocks = pl.cdiv(pixels, block_length(pixels, ROWS))
    sums = _result_shape(y, (blocks, depth), _wide_dtype(y))
    result, *partial = pl.pallas_call(
        functools.partial(_multiply_by_kernel, relu),
        out_shape=(_result_shape(y, (pixels, depth)), *((sums, sums) if inputs else ())),
        grid=(pl.cdiv(depth, block_length(depth, COLUMNS)), blocks),
        compiler_params=COMPILER,
        interpret=interpret,
        name="fused_image_gradient",
    )(incoming, kernel, inputs)
    return result, tuple(each.sum(0) for each in partial)


def kernel_gradient(
    x: jax.Array, before: Norm | None, incoming: Incoming, *, relu: bool, interpret: bool = False
) -> jax.Array:
    """Compute the gradient with respect to the kernel of `convolve`, float32[K, F].

    The arguments are those of `image_gradient`.
    """
    (pixels, depth), features = x.shape, incoming.y.shape[1]
    grid = (pl.cdiv(features, block_length(features, COLUMNS)), pl.cdiv(depth, block_length(depth, ROWS)))
    blocks = pl.cdiv(pixels, block_length(pixels, DEPTH))
    parts = max(1, min(MULTIPROCESSORS // math.prod(grid), blocks // LEAST_STEPS))
    steps = pl.cdiv(blocks, parts)
    parts = pl.cdiv(blocks, steps)
    partial = pl.pallas_call(
        functools.partial(_multiply_by_gradient, relu, parts, steps),
        out_shape=_result_shape(x, (parts, depth, features), _wide_dtype(x)),
        grid=(*grid, parts),
        compiler_params=COMPILER,
        interpret=interpret,
        name="fused_kernel_gradient",
    )(x, before, incoming)
    return partial.sum(0)


# --- Kernels; their arguments are references to whole arrays ---


def _multiply(x: Any, before: Any, kernel: Any, y: Any, sums: Any, squares: Any) -> None:
    columns, rows = Block.of(pl.program_id(0), y.shape[1], COLUMNS), Block.of(pl.program_id(1), y.shape[0], ROWS)

    def product(step: jax.Array) -> jax.Array:
        depth = Block.of(step, x.shape[1], DEPTH)
        return _dot(_normalized(x, before, rows, depth), load(kernel, depth, columns), 1, 0)

    result = _sum_products(product, x.shape[1], rows, columns, _wide_dtype(y)).astype(y.dtype)
    store(y, result, rows, columns)
    # The statistics are of the rounded result.
    wide = result.astype(sums.dtype)
    store(sums, wide.sum(0), pl.program_id(1), columns)
    store(squares, jnp.square(wide).sum(0), pl.program_id(1), columns)


def _multiply_by_kernel(relu: bool, incoming: Any, kernel: Any, inputs: Any, result: Any, *sums: Any) -> None:
    y = incoming.y
    columns, rows = Block.of(pl.program_id(0), kernel.shape[0], COLUMNS), Block.of(pl.program_id(1), y.shape[0], ROWS)

    def product(step: jax.Array) -> jax.Array:
        depth = Block.of(step, y.shape[1], DEPTH)
        return _dot(_gradient_by_y(incoming, relu, rows, depth), load(kernel, columns, depth), 1, 1)

    own = _sum_products(product, y.shape[1], rows, columns, _wide_dtype(y))
    if inputs is not None:
        x, norm = load(inputs[0], rows, columns).astype(own.dtype), _vectors(inputs[1], columns)
        own = jnp.where(_affine(x, norm) > 0, own, 0)
        rounded = own.astype(result.dtype).astype(own.dtype)
        store(sums[0], rounded.sum(0), pl.program_id(1), columns)
        store(sums[1], (rounded * (x - norm.mean)).sum(0), pl.program_id(1), columns)
    store(result, own.astype(result.dtype), rows, columns)


def _multiply_by_gradient(relu: bool, parts: int, steps: int, x: Any, before: Any, incoming: Any, result: Any) -> None:
    columns = Block.of(pl.program_id(0), incoming.y.shape[1], COLUMNS)
    depth = Block.of(pl.program_id(1), x.shape[1], ROWS)
    length, first = block_length(x.shape[0], DEPTH), pl.program_id(2) * steps
    exact = parts * steps * length == x.shape[0]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        rows = Block((first + step) * length, length, x.shape[0], exact)
        own = _gradient_by_y(incoming, relu, rows, columns)
        return total + _dot(_normalized(x, before, rows, depth), own, 0, 0)

    zeros = jnp.zeros((depth.length, columns.length), result.dtype)
    store(result, lax.fori_loop(0, steps, add, zeros), pl.program_id(2), depth, columns)


def _normalized(x: Any, norm: Any, rows: Block, columns: Block) -> jax.Array:
    """Return relu(normalized(x)) of a block; rows past the end are zero."""
    values = load(x, rows, columns)
    if norm is None:
        return values
    result = _affine(values.astype(_wide_dtype(x)), _vectors(norm, columns)).astype(x.dtype)
    # Not jnp.maximum, which returns 0 for NaN on Triton.
    return zero_outside(jnp.where(result < 0, 0, result), rows, columns)


def _gradient_by_y(incoming: Any, relu: bool, rows: Block, columns: Block) -> jax.Array:
    """Return the gradient by y of a block; rows past the end are zero."""
    gradient, y = (load(ref, rows, columns).astype(_wide_dtype(ref)) for ref in (incoming.gradient, incoming.y))
    norm, shift, slope = _vectors(incoming.norm, columns)
    if relu:
        gradient = jnp.where(_affine(y, norm) > 0, gradient, 0)
    own = norm.multiplier * (gradient - shift - (y - norm.mean) * slope)
    return zero_outside(own.astype(incoming.y.dtype), rows, columns)


def _vectors(refs: Any, columns: Block) -> Any:
    return jax.tree.map(lambda ref: load(ref, columns), refs)


def _affine(x: jax.Array, norm: Norm) -> jax.Array:
    return (x - norm.mean) * norm.multiplier + norm.bias


def _sum_products(
    product: Callable[[jax.Array], jax.Array], depth: int, rows: Block, columns: Block, dtype: Any
) -> jax.Array:
    """Sum the products of a block's steps along the contracted axis."""
    steps = pl.cdiv(depth, block_length(depth, DEPTH))
    zeros = jnp.zeros((rows.length, columns.length), dtype)
    return lax.fori_loop(0, steps, lambda step, total: total + product(step), zeros)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=_wide_dtype(a))


def _wide_dtype(array: Any) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)


def _result_shape(array: jax.Array, shape: tuple[int, ...], dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Return a result's shape and dtype. Within a `shard_map` the result varies over the same axes as `array`."""
    # The attribute for these axes has other names in other releases of JAX.
    return jax.eval_shape(lambda values: lax.full_like(values, 0, dtype, shape) + values.sum(dtype=dtype), array)
