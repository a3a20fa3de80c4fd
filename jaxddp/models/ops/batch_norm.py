"""Batch norm fused with the addition, the ReLU and the max pool that follow it in a ResNet, with a custom gradient.

On a GPU memory traffic determines the time of these operations. The custom gradient reads the gradient of the result
and the input twice each, and writes the gradient of the input once. (With an addition, the gradient through the ReLU is
also written for the shortcut and read again.) The gradient that JAX derives has 1.5 times as much traffic.
`benchmarks/gpu_program.py` counts the kernels that XLA creates, and their traffic.

Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), section 3.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxddp.core.errors import InputError
from jaxddp.models.interface import as_wide
from jaxddp.models.ops.layers import MaxPool, max_pool, max_pool_gradient, max_pool_with_positions

_FEW_PIXELS = 8192
"""Of fewer pixels, XLA would write the sum of two halves to memory."""
Pool = tuple[int, int, int]
"""The window, the stride and the padding of a max pool."""
Pair = tuple[jax.Array, jax.Array]
"""Two arrays [C], such as (scale, bias), (mean, variance) or (sum, sum of squares)."""


class BatchNorm(nn.Module):
    """A batch norm, relu(normalized(x) + residual), whose parameters and results equal those of `flax.linen.BatchNorm`.

    It normalizes the last axis by the mean and the biased variance over all other axes. In training the first
    differentiation must be in reverse mode, so `jax.jvp` and `jax.hessian` are not supported. Reverse mode is supported
    for derivatives of any order.

    Attributes:
        use_running_average: normalize by the statistics in the collection `batch_stats`, without updating them.
            Otherwise normalize by the statistics of the batch.
        momentum: the weight of the old running average. PyTorch's momentum is 1 - `momentum`.
        axis_name: the mesh axis over which statistics are averaged; None for the statistics of each device.
        group: the number of consecutive images that are normalized together; None for all images of a device. Running
            statistics take the mean over the groups, as a step takes the mean over its devices. `group` and
            `axis_name` cannot be combined.
        dtype: the dtype of the result. In training, statistics and intermediate values are float32 or wider.
        scale_init: the initializer of the scale; None for a constant 1 instead of a parameter.
        max_pool: the function that computes a max pool without the custom gradient.
        custom_gradient: use the custom gradient, take the maxima of `pool` before the norm, and compute two sums over
            the same pixels in one reduction. Disable it on a CPU, where JAX's derived gradient is faster and a
            reduction of pairs takes five times as long as two reductions.
    """

    use_running_average: bool
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | None = None
    group: int | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    scale_init: nn.initializers.Initializer | None = nn.initializers.ones
    max_pool: MaxPool = max_pool
    custom_gradient: bool = True

    @nn.compact
    def __call__(
        self, x: jax.Array, residual: jax.Array | None = None, *, relu: bool = False, pool: Pool | None = None
    ) -> jax.Array:
        """Normalize x: float[B, ..., C] -> `dtype`[B, ..., C].

        Args:
            residual: an array of the result's shape and dtype, which is added before the ReLU.
            pool: the max pool after the ReLU of images [B, H, W, C], without a residual: -> [B, H', W', C].

        Raises:
            InputError: in training, the number of images is not a multiple of the group size.
        """
        features, x = x.shape[-1:], x.astype(self.dtype)
        scale = None if self.scale_init is None else self.param("scale", self.scale_init, features, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, features, self.param_dtype)
        scale = jnp.ones_like(bias) if scale is None else scale
        mean = self.variable("batch_stats", "mean", jnp.zeros, features, self.param_dtype)
        var = self.variable("batch_stats", "var", jnp.ones, features, self.param_dtype)
        if self.use_running_average:
            multiplier = lax.rsqrt(var.value + self.epsilon) * scale
            result = apply_norm(x, mean.value, multiplier, bias, residual, relu)
            return result if pool is None else self.max_pool(result, *pool)
        # The custom gradient does not sum over the devices of a `shard_map`; the gradient of this cast does.
        if axes := tuple(_varying(x) - _varying(scale)):
            scale, bias = lax.pcast((scale, bias), axes, to="varying")
        normalized: Any = _normalize_fused if self.custom_gradient else _normalize
        fused_pool = pool if self.custom_gradient else None
        options = _Options(relu, self.epsilon, self.axis_name, self.custom_gradient, fused_pool)

        def normalize(x: jax.Array, residual: jax.Array | None) -> _Result:
            return normalized(x, scale, bias, residual, options)

        if self.group is None:
            result, *batch = normalize(x, residual)
        else:
            result, *batch = _normalize_in_groups(normalize, self.group, x, residual)
        if not self.is_initializing():
            for running, current in zip((mean, var), batch, strict=True):
                new = self.momentum * running.value + (1 - self.momentum) * lax.stop_gradient(current)
                running.value = new.astype(self.param_dtype)
        return self.max_pool(result, *pool) if pool and not fused_pool else result


class _Options(NamedTuple):
    relu: bool
    epsilon: float
    axis_name: str | None
    custom_gradient: bool
    pool: Pool | None


_Result = tuple[jax.Array, jax.Array, jax.Array]


def _normalize_in_groups(normalize: Any, size: int, x: jax.Array, residual: jax.Array | None) -> _Result:
    """Normalize each group of `size` consecutive images separately; return the mean of the groups' statistics."""

    def split(images: jax.Array) -> jax.Array:
        if len(images) % size:
            problem = f"batch norm: {len(images)} images cannot be normalized in groups of {size}"
            raise InputError(problem, advice=f"give each device a multiple of {size}")
        return images.reshape(-1, size, *images.shape[1:])

    result, mean, var = jax.vmap(normalize)(*jax.tree.map(split, (x, residual)))
    return result.reshape(len(x), *result.shape[2:]), mean.mean(0), var.mean(0)


def _normalize(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, options: _Options
) -> _Result:
    """Return the result and the batch's mean and variance, [C], which have no gradient."""
    return _forward(x, scale, bias, residual, options)[0]


def _forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, options: _Options
) -> tuple[_Result, Any]:
    wide = as_wide(x)
    values = wide, jnp.square(wide)
    totals = _paired_sums(*map(_sum_of_halves, values)) if options.custom_gradient else _sums(*values)
    mean, var = moments(totals, x.size // x.shape[-1], options.axis_name)
    deviation = lax.rsqrt(var + options.epsilon)
    multiplier, kept, positions = deviation * scale, x, None
    if options.pool:
        # The norm and the ReLU are monotone: increasing, or decreasing where the multiplier is negative. So the
        # maximum, or the minimum, is taken before them, and they compute fewer pixels.
        sign = jnp.where(multiplier < 0, -1, 1).astype(x.dtype)
        kept, (positions, _) = max_pool_with_positions(x * sign, *options.pool)
        kept *= sign
    normalize = functools.partial(apply_norm, mean=mean, multiplier=multiplier, bias=bias, relu=options.relu)
    # With a residual or a pool, a kernel reads several arrays. Other activations than a ReLU are fused with the norm.
    if options.custom_gradient and options.relu and residual is None and not options.pool:
        result = jnp.concatenate([normalize(part, residual=None) for part in _split(kept, 4)])
    else:
        result = normalize(kept, residual=residual)
    # Alone, a ReLU gets its mask in the backward pass from the norm's input, which is read there in any case.
    has_residual = residual is not None
    relu_result = result if options.relu and (has_residual or options.pool) else None
    return (result, mean, var), (x, kept, mean, deviation, scale, bias, has_residual, relu_result, positions)


def _backward(options: _Options, saved: Any, grads: _Result) -> tuple[jax.Array | None, ...]:
    x, kept, mean, deviation, scale, bias, has_residual, result, positions = saved
    multiplier, grad = deviation * scale, grads[0]
    if result is not None:
        # The result of the ReLU is a maximum. XLA would rewrite "result > 0" as a comparison of the maximum's operand,
        # and read that operand's inputs again.
        grad = jnp.where(result != 0, grad, 0)
    wide = grad.astype(mean.dtype)
    if options.relu and result is None:
        wide = jnp.where(is_positive(x, mean, multiplier, bias), wide, 0)
    mean = lax.broadcast_to_rank(mean, x.ndim)
    bias_grad, moment = totals = _paired_sums(wide, wide * (kept.astype(mean.dtype) - mean))
    shift, slope = statistics_gradient(totals, deviation, x.size // x.shape[-1], options.axis_name)
    # XLA computes these products of vectors in one kernel. With "multiplier * (…)" it would write some of the factors
    # in a kernel each.
    factors = multiplier, multiplier * shift, multiplier * slope
    multiplier, shift, slope = (lax.broadcast_to_rank(each, x.ndim) for each in factors)
    if options.pool:
        (wide,) = max_pool_gradient(*options.pool, (positions, x.shape), wide)
    x_grad = multiplier * wide - shift - (x.astype(mean.dtype) - mean) * slope
    parameter_grads = (moment * deviation).astype(scale.dtype), bias_grad.astype(bias.dtype)
    return x_grad.astype(x.dtype), *parameter_grads, grad if has_residual else None


_normalize_fused = jax.custom_vjp(_normalize, nondiff_argnums=(4,))
_normalize_fused.defvjp(_forward, _backward)


def _varying(x: jax.Array) -> frozenset[str]:
    """Return the axes of a `shard_map` along which an array may differ."""
    return jax.typeof(x).manual_axis_type.varying


def moments(totals: Pair, count: int, axis_name: str | None) -> Pair:
    """Return the mean and the biased variance of `count` values, from their sum and their sum of squares.

    With `axis_name` the two results are averaged over this mesh axis.
    """
    mean, mean_of_squares = (total / count for total in totals)
    if axis_name is not None:
        mean, mean_of_squares = lax.pmean((mean, mean_of_squares), axis_name)
    # Rounding may give a slightly negative variance.
    return mean, jnp.maximum(0, mean_of_squares - jnp.square(mean))


def statistics_gradient(totals: Pair, deviation: jax.Array, count: int, axis_name: str | None) -> Pair:
    """Return (shift, slope) of the input's gradient, multiplier * (gradient - shift - (x - mean) * slope).

    Args:
        totals: the sum of the result's gradient, and the sum of the result's gradient times (x - mean).
        deviation: 1 / sqrt(variance + epsilon).
        count: the number of values on a device.
    """
    total, moment = totals
    if axis_name is not None:
        total, moment = lax.psum((total, moment), axis_name)
        count *= lax.axis_size(axis_name)
    return total / count, jnp.square(deviation) * moment / count


def apply_norm(
    x: jax.Array, mean: jax.Array, multiplier: jax.Array, bias: jax.Array, residual: jax.Array | None, relu: bool
) -> jax.Array:
    """Compute relu((x - mean) * multiplier + bias + residual), in the dtype of x."""
    wide = x.astype(jnp.promote_types(x.dtype, mean.dtype))
    mean, multiplier, bias = (lax.broadcast_to_rank(each, x.ndim) for each in (mean, multiplier, bias))
    result = ((wide - mean) * multiplier + bias).astype(x.dtype)
    if residual is not None:
        result = result + residual
    return nn.relu(result) if relu else result


def is_positive(x: jax.Array, mean: jax.Array, multiplier: jax.Array, bias: jax.Array) -> jax.Array:
    """Return the mask of (x - mean) * multiplier + bias > 0, by one comparison with a bound for each channel.

    XLA recomputes one comparison wherever the mask is used. A more expensive mask, as large as `x`, would be written to
    memory. The bound is rounded, so the mask may be wrong where the input equals the bound up to rounding, as in a
    constant channel with almost no bias.
    """
    falling = multiplier < 0
    bound = mean - bias / jnp.where(multiplier == 0, 1, multiplier)
    bound = jnp.where(multiplier == 0, jnp.where(bias > 0, -jnp.inf, jnp.inf), bound)
    # With a negative multiplier the condition is x < bound. It is computed as not (x > the next number below the
    # bound). Below 0 that is the smallest normal number, because XLA treats smaller numbers as 0.
    bound = lax.stop_gradient(bound)
    below = jnp.where(bound == 0, -jnp.finfo(bound.dtype).tiny, jnp.nextafter(bound, -jnp.inf))
    bound, falling = (lax.broadcast_to_rank(each, x.ndim) for each in (jnp.where(falling, below, bound), falling))
    return (x.astype(mean.dtype) > bound) ^ falling


def _sums(a: jax.Array, b: jax.Array) -> Pair:
    """Sum two arrays [..., C] over all axes except the last, in two reductions; `_paired_sums` in one of pairs."""
    axes = tuple(range(a.ndim - 1))
    return a.sum(axes), b.sum(axes)


@jax.custom_jvp
def _paired_sums(a: jax.Array, b: jax.Array) -> Pair:
    zero, axes = jnp.zeros((), a.dtype), tuple(range(a.ndim - 1))
    return tuple(lax.reduce((a, b), (zero, zero), lambda x, y: (x[0] + y[0], x[1] + y[1]), axes))


def _split(x: jax.Array, count: int) -> list[jax.Array]:
    """Split images into parts that one GPU kernel reads side by side, so that more of its reads are in flight."""
    return jnp.split(x, math.gcd(len(x), count))


def _sum_of_halves(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, _split(x, 2 if x.size // x.shape[-1] >= _FEW_PIXELS else 1))


# JAX's rule for a reduction of pairs fails if an operand has no tangent, so sum the tangents in two reductions.
_paired_sums.defjvp(lambda primals, tangents: (_paired_sums(*primals), _sums(*tangents)))
