"""Fuses batch norm, a 1x1 convolution and the following batch norm into fewer passes over memory.

On a GPU the three operations are bound by memory. Here the convolution normalizes its input while it reads it, and sums
the statistics of its result while it writes it. The kernels of its two gradients also compute the gradient of the
following norm while they read (`kernels.py`). XLA applies the following norm, whose statistics need the whole
convolution, and sums its gradient.

The operation compiles for an H200, and `pointwise.py` counts its bytes, but it was not timed on a GPU. Therefore no
network of jaxddp uses it. A bottleneck block would call `convolve_between_norms` in place of a 1x1 convolution and its
norms:

    y, moments1, _ = convolve_between_norms(x, kernel1, norm1, form=Form(relu=True))
    y = conv2(y)
    y, moments3, moments2 = convolve_between_norms(y, kernel3, norm3, norm2, residual=x, form=Form(relu=True))

`norm1` is (scale, bias). `moments1` is (mean, variance) of the batch, for running averages.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.fused.kernels import Incoming, Norm, NormGradient, convolve, image_gradient, kernel_gradient
from jaxddp.models.ops.batch_norm import Pair, apply_norm, is_positive, moments, statistics_gradient, sums


class Form(NamedTuple):
    """Static options of the fused operation.

    Attributes:
        relu: Whether a ReLU follows.
        axis_name: Mesh axis over which statistics are averaged, or None for those of the device.
        interpret: Whether to compute the kernels by plain operations, on any platform. Otherwise a GPU is needed.
    """

    relu: bool = False
    epsilon: float = 1e-5
    axis_name: str | None = None
    interpret: bool = False


def convolve_between_norms(
    x: jax.Array,
    kernel: jax.Array,
    after: Pair,
    before: Pair | None = None,
    residual: jax.Array | None = None,
    *,
    form: Form,
) -> tuple[jax.Array, Pair, Pair | None]:
    """Compute norm_after(relu(norm_before(x)) kernel) + residual, and optionally a ReLU of it, in training.

    Values and gradients equal those of `batch_norm.BatchNorm` before and after the convolution.

    Args:
        x: bfloat16 or float32[..., K].
        kernel: [K, F] or [1, 1, K, F] of any dtype, which its gradient has too. It is cast to the dtype of `x`.
        after: Scale and bias of the norm after the convolution.
        before: Scale and bias of the norm of `x`, which a ReLU follows; None convolves `x` itself.
        residual: An array of the result's shape and dtype, added before the ReLU.

    Returns:
        The result, [..., F], with the dtype of `x`; mean and variance of the convolution; and those of `x`, or None
        without `before`. Mean and variance have no gradient.

    Raises:
        ValueError: There is no GPU and `form.interpret` is False (raised by JAX).
    """
    pixels, matrix = x.reshape(-1, x.shape[-1]), kernel.reshape(kernel.shape[-2:])
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    fused: Any = _fused
    result, y_moments, x_moments = fused(form, pixels, matrix, before, after, added)
    return result.reshape(*x.shape[:-1], -1), y_moments, x_moments


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    form: Form, x: jax.Array, kernel: jax.Array, before: Pair | None, after: Pair, residual: jax.Array | None
) -> tuple[jax.Array, Pair, Pair | None]:
    return _forward(form, x, kernel, before, after, residual)[0]


def _forward(
    form: Form, x: jax.Array, kernel: jax.Array, before: Pair | None, after: Pair, residual: jax.Array | None
) -> tuple[tuple[jax.Array, Pair, Pair | None], Any]:
    count, norm, x_moments = len(x), None, None
    if before is not None:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x_moments = moments(sums(wide, jnp.square(wide), paired=True), count, form.axis_name)
        norm = _norm(x_moments, before, form)
    y, totals = convolve(x, norm, kernel.astype(x.dtype), interpret=form.interpret)
    y_moments = moments(totals, count, form.axis_name)
    result = apply_norm(y, *_norm(y_moments, after, form), residual, form.relu)
    # Without a residual the sign follows from y, which is read anyway.
    saved_result = result if form.relu and residual is not None else None
    return (result, y_moments, x_moments), (
        x,
        kernel,
        y,
        before,
        x_moments,
        after,
        y_moments,
        residual is not None,
        saved_result,
    )


def _backward(form: Form, saved: Any, grads: Any) -> tuple[Any, ...]:
    x, kernel, y, before, x_moments, after, y_moments, has_residual, result = saved
    gradient, count = grads[0], len(x)
    relu = form.relu and result is None
    if result is not None:
        # As in batch_norm.py, where ">" would be more expensive.
        gradient = jnp.where(result != 0, gradient, 0)
    norm = _norm(y_moments, after, form)
    wide = gradient.astype(norm.mean.dtype)
    if relu:
        wide = jnp.where(is_positive(y, *norm), wide, 0)
    totals = sums(wide, wide * (y.astype(wide.dtype) - norm.mean), paired=True)
    after_grads, norm_gradient = _gradients(norm, y_moments, totals, count, form)

    incoming = Incoming(gradient, y, norm_gradient)
    x_norm = None if before is None else _norm(x_moments, before, form)
    inputs = None if x_norm is None else (x, x_norm)
    image, totals = image_gradient(incoming, kernel.astype(x.dtype), inputs, relu=relu, interpret=form.interpret)
    by_kernel = kernel_gradient(x, x_norm, incoming, relu=relu, interpret=form.interpret).astype(kernel.dtype)
    before_grads = None
    if x_norm is not None:
        before_grads, x_norm_gradient = _gradients(x_norm, x_moments, totals, count, form)
        wide = image.astype(x_norm.mean.dtype) - x_norm_gradient.shift
        x_grad = x_norm.multiplier * (wide - (x.astype(wide.dtype) - x_norm.mean) * x_norm_gradient.slope)
        image = x_grad.astype(x.dtype)
    return image, by_kernel, before_grads, after_grads, gradient if has_residual else None


_fused.defvjp(_forward, _backward)


def _norm(statistics: Pair, parameters: Pair, form: Form) -> Norm:
    (mean, var), (scale, bias) = statistics, parameters
    return Norm(mean, lax.rsqrt(var + form.epsilon) * scale, bias)


def _gradients(norm: Norm, statistics: Pair, totals: Pair, count: int, form: Form) -> tuple[Pair, NormGradient]:
    """Return the gradients with respect to scale, bias and input of a norm.

    Args:
        totals: The sums over rows of the gradient g with respect to the norm's output, and of g * (x - mean).
    """
    (total, moment), deviation = totals, lax.rsqrt(statistics[1] + form.epsilon)
    norm_gradient = NormGradient(norm, *statistics_gradient(totals, deviation, count, form.axis_name))
    return (moment * deviation, total), norm_gradient
