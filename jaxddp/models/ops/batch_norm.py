"""Batch norm together with the addition and the ReLU that follow it in a residual network, and its gradient by hand.

On a GPU these operations cost what they read and write. The gradient here reads the incoming gradient and the input
twice and writes once (with an addition, the ReLU's part of it is written for the shortcut, and read again); what JAX
derives reads and writes half as much again. How XLA fuses it is counted by `benchmarks/gpu_program.py`.

Ioffe and Szegedy 2015 (arXiv:1502.03167), section 3.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxddp.core.errors import InputError

Pair = tuple[jax.Array, jax.Array]
"""Two arrays [C], of which a norm needs many: (scale, bias), (mean, variance), (sum, sum of squares)."""


class BatchNorm(nn.Module):
    """relu(normalized(x) + residual), with the parameters, statistics and values of `flax.linen.BatchNorm`.

    Normalizes the last axis by the mean and the biased variance over all others. In training it can be differentiated
    in reverse mode, as often as wanted, but not first in forward mode (`jax.jvp`, `jax.hessian`).

    Attributes:
        use_running_average: of the collection `batch_stats`, which is left as it is; else the batch's own.
        momentum: how much of the old running average stays; torch's 0.1, how much comes, is the same rule.
        axis_name: mesh axis over which statistics are averaged; None for those of a device.
        group: so many consecutive images are normalized together and apart from all others, and the running statistics
            take the mean of the groups', as a step takes the mean of its devices'. None for all images of a device; a
            number goes with no `axis_name`.
        dtype: of the result. In training, statistics and what is computed between are in float32 at least.
        scale_init: None for a scale that is 1 and no parameter.
        by_hand: the gradient is this module's, and two sums over the same pixels are one reduction. On a CPU what JAX
            derives is quicker, and a reduction of pairs takes five times as long as two.
    """

    use_running_average: bool
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | None = None
    group: int | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    scale_init: nn.initializers.Initializer | None = nn.initializers.ones
    by_hand: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None, *, relu: bool = False) -> jax.Array:
        """float[..., C] -> `dtype`[..., C].

        Args:
            residual: of the result's shape and dtype; added before the ReLU.

        Raises:
            InputError: in training, the groups do not make up the images.
        """
        features, x = x.shape[-1:], x.astype(self.dtype)
        scale = None if self.scale_init is None else self.param("scale", self.scale_init, features, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, features, self.param_dtype)
        scale = jnp.ones_like(bias) if scale is None else scale
        mean = self.variable("batch_stats", "mean", jnp.zeros, features, self.param_dtype)
        var = self.variable("batch_stats", "var", jnp.ones, features, self.param_dtype)
        if self.use_running_average:
            multiplier = lax.rsqrt(var.value + self.epsilon) * scale
            return applied(x, mean.value, multiplier, bias, residual, relu)
        # A gradient by hand sums nothing over a `shard_map`'s devices; the gradient of this cast does.
        if axes := tuple(_varying(x) - _varying(scale)):
            scale, bias = lax.pcast((scale, bias), axes, to="varying")
        normalized: Any = _normalize if self.by_hand else _derived
        form = _Form(relu, self.epsilon, self.axis_name, self.by_hand)

        def normalize(x: jax.Array, residual: jax.Array | None) -> _Result:
            return normalized(x, scale, bias, residual, form)

        result, *batch = (normalize if self.group is None else _in_groups(normalize, self.group))(x, residual)
        if not self.is_initializing():
            for running, own in zip((mean, var), batch, strict=True):
                new = self.momentum * running.value + (1 - self.momentum) * lax.stop_gradient(own)
                running.value = new.astype(self.param_dtype)
        return result


class _Form(NamedTuple):
    relu: bool
    epsilon: float
    axis_name: str | None
    by_hand: bool


_Result = tuple[jax.Array, jax.Array, jax.Array]


def _in_groups(normalize: Callable[..., _Result], size: int) -> Callable[..., _Result]:
    """Of each `size` consecutive images by themselves; mean and variance are the means of the groups'."""

    def split(images: jax.Array) -> jax.Array:
        if len(images) % size:
            raise InputError(
                f"batch norm: {len(images)} images cannot be normalized {size} at a time; give each device a "
                f"multiple of {size}"
            )
        return images.reshape(-1, size, *images.shape[1:])

    def normalize_groups(x: jax.Array, residual: jax.Array | None) -> _Result:
        result, mean, var = jax.vmap(normalize)(*jax.tree.map(split, (x, residual)))
        return result.reshape(x.shape), mean.mean(0), var.mean(0)

    return normalize_groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, form: _Form) -> _Result:
    """The result, and the mean and variance of the batch, [C], which pass no gradient on."""
    return _forward(x, scale, bias, residual, form)[0]


def _derived(x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, form: _Form) -> _Result:
    """The same with the gradient that JAX derives."""
    return _forward(x, scale, bias, residual, form)[0]


def _forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, form: _Form
) -> tuple[_Result, Any]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    totals = sums(wide, jnp.square(wide), form.by_hand)
    mean, var = moments(totals, x.size // x.shape[-1], form.axis_name)
    deviation = lax.rsqrt(var + form.epsilon)
    result = applied(x, mean, deviation * scale, bias, residual, form.relu)
    # Without an addition the sign is found from the input, which is read anyway.
    kept = result if form.relu and residual is not None else None
    return (result, mean, var), (x, mean, deviation, scale, bias, residual is not None, kept)


def _backward(form: _Form, saved: Any, grads: _Result) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    x, mean, deviation, scale, bias, has_residual, result = saved
    multiplier, grad = deviation * scale, grads[0]
    if form.relu and has_residual:
        # "> 0" XLA would rewrite as a question about what the maximum was taken of, and read all of that again.
        grad = jnp.where(result != 0, grad, 0)
    wide = grad.astype(mean.dtype)
    if form.relu and not has_residual:
        wide = jnp.where(is_positive(x, mean, multiplier, bias), wide, 0)
    centered = x.astype(mean.dtype) - mean
    bias_grad, moment = totals = sums(wide, wide * centered, paired=True)
    shift, slope = through_statistics(totals, deviation, x.size // x.shape[-1], form.axis_name)
    own = multiplier * (wide - shift - centered * slope)
    of_parameters = (moment * deviation).astype(scale.dtype), bias_grad.astype(bias.dtype)
    return own.astype(x.dtype), *of_parameters, grad if has_residual else None


_normalize.defvjp(_forward, _backward)


def _varying(x: jax.Array) -> frozenset[str]:
    """The axes of a `shard_map` along which an array may differ."""
    return jax.typeof(x).manual_axis_type.varying


def moments(totals: Pair, count: int, axis_name: str | None) -> Pair:
    """Mean and biased variance of `count` values, from their sum and that of their squares; over devices, if named."""
    mean, mean_of_squares = (total / count for total in totals)
    if axis_name is not None:
        mean, mean_of_squares = lax.pmean((mean, mean_of_squares), axis_name)
    # Rounding may leave a little below zero.
    return mean, jnp.maximum(0, mean_of_squares - jnp.square(mean))


def through_statistics(totals: Pair, deviation: jax.Array, count: int, axis_name: str | None) -> Pair:
    """(shift, slope) of the gradient by a norm's input: multiplier (gradient - shift - (x - mean) slope).

    Args:
        totals: the sums of the gradient by the result, and of that times (x - mean).
        deviation: 1 / sqrt(variance + epsilon).
        count: of the values on a device.
    """
    total, moment = totals
    if axis_name is not None:
        total, moment = lax.psum((total, moment), axis_name)
        count *= lax.axis_size(axis_name)
    return total / count, jnp.square(deviation) * moment / count


def applied(
    x: jax.Array, mean: jax.Array, multiplier: jax.Array, bias: jax.Array, residual: jax.Array | None, relu: bool
) -> jax.Array:
    """relu((x - mean) multiplier + bias + residual), of x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, mean.dtype))
    result = ((wide - mean) * multiplier + bias).astype(x.dtype)
    if residual is not None:
        result = result + residual
    return nn.relu(result) if relu else result


def is_positive(x: jax.Array, mean: jax.Array, multiplier: jax.Array, bias: jax.Array) -> jax.Array:
    """Where (x - mean) multiplier + bias > 0, by one comparison with a bound for each channel.

    What is as cheap as that, XLA computes wherever it is needed; of anything more it writes a mask as large as `x`. The
    bound is rounded: where the input lies on it up to rounding, as all of a channel that is constant and hardly biased,
    the answer may be the other one.
    """
    falling = multiplier < 0
    bound = mean - bias / jnp.where(multiplier == 0, 1, multiplier)
    bound = jnp.where(multiplier == 0, jnp.where(bias > 0, -jnp.inf, jnp.inf), bound)
    # Of a falling line it is x < bound, which is not x > the next number below. Below 0 that would be taken for 0.
    bound = lax.stop_gradient(bound)
    below = jnp.where(bound == 0, -jnp.finfo(bound.dtype).tiny, jnp.nextafter(bound, -jnp.inf))
    bound = jnp.where(falling, below, bound)
    return (x.astype(mean.dtype) > bound) ^ falling


def sums(a: jax.Array, b: jax.Array, paired: bool) -> Pair:
    """The sums of two [..., C] over all axes but the last, as one reduction of pairs or as two."""
    return _paired_sums(a, b) if paired else _sums(a, b)


def _sums(a: jax.Array, b: jax.Array) -> Pair:
    axes = tuple(range(a.ndim - 1))
    return a.sum(axes), b.sum(axes)


@jax.custom_jvp
def _paired_sums(a: jax.Array, b: jax.Array) -> Pair:
    zero, axes = jnp.zeros((), a.dtype), tuple(range(a.ndim - 1))
    return tuple(lax.reduce((a, b), (zero, zero), lambda x, y: (x[0] + y[0], x[1] + y[1]), axes))


# JAX's own rule for a reduction of pairs wants a tangent of both.
_paired_sums.defjvp(lambda primals, tangents: (_paired_sums(*primals), _sums(*tangents)))
