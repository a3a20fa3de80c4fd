"""Batch norm, a 1x1 convolution and the batch norm behind it with fewer passes over memory; no network uses it yet.

On a GPU the three cost what they read and write. Here the convolution normalizes its input while it reads it, and sums
the statistics of its result while it writes it; its two gradients compute that of the norm behind it as they read
(`kernels.py`). What is left to XLA is to apply the norm behind, whose statistics are known only when all of the
convolution is computed, and the sums of that norm's gradient.

It compiles for an H200, and its bytes are counted (`benchmarks/fused/pointwise.py`); no GPU has timed it. Until one
has, it is switched on by a model of one's own alone: `get_model` of a recipe file returns a network whose blocks call
`convolve_between_norms` in the place of a 1x1 convolution and its norms, such as, in a bottleneck,

    y, own, _ = convolve_between_norms(x, kernel1, norm1, form=Form(relu=True))
    y = conv2(y)
    y, own, before = convolve_between_norms(y, kernel3, norm3, norm2, residual=x, form=Form(relu=True))

where `norm1` is (scale, bias), and `own` and `before` are the (mean, variance) of a batch that running averages take.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.fused.kernels import Incoming, Norm, NormGradient, convolve, image_gradient, kernel_gradient
from jaxddp.models.ops.batch_norm import Pair, applied, is_positive, moments, sums, through_statistics


class Form(NamedTuple):
    """What is known when the program is traced.

    Attributes:
        relu: a ReLU ends it.
        axis_name: mesh axis over which statistics are averaged; None for those of a device.
        interpret: compute the kernels by plain operations, on any platform; without it a GPU is needed.
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
    """norm_after(relu(norm_before(x)) kernel) + residual, and a ReLU of it, in training.

    Values and gradients are those of `batch_norm.BatchNorm` before and behind the convolution.

    Args:
        x: bfloat16 or float32[..., K].
        kernel: [K, F] or [1, 1, K, F], of any dtype, which its gradient has too; multiplied in that of `x`.
        after: scale and bias of the norm behind the convolution.
        before: those of the norm of `x`, which a ReLU follows; None convolves `x` as it is.
        residual: of the result's shape and dtype; added before the ReLU.

    Returns:
        The result, [..., F], of the dtype of `x`; mean and variance of the convolution; those of `x`, None without
        `before`. Mean and variance pass no gradient on.

    Raises:
        ValueError: of JAX, where no GPU is, and `form` does not ask for plain operations.
    """
    pixels, matrix = x.reshape(-1, x.shape[-1]), kernel.reshape(kernel.shape[-2:])
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    fused: Any = _fused
    result, own, others = fused(form, pixels, matrix, before, after, added)
    return result.reshape(*x.shape[:-1], -1), own, others


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    form: Form, x: jax.Array, kernel: jax.Array, before: Pair | None, after: Pair, residual: jax.Array | None
) -> tuple[jax.Array, Pair, Pair | None]:
    return _forward(form, x, kernel, before, after, residual)[0]


def _forward(
    form: Form, x: jax.Array, kernel: jax.Array, before: Pair | None, after: Pair, residual: jax.Array | None
) -> tuple[tuple[jax.Array, Pair, Pair | None], Any]:
    count, norm, others = len(x), None, None
    if before is not None:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        others = moments(sums(wide, jnp.square(wide), paired=True), count, form.axis_name)
        norm = _norm(others, before, form)
    y, totals = convolve(x, norm, kernel.astype(x.dtype), interpret=form.interpret)
    own = moments(totals, count, form.axis_name)
    result = applied(y, *_norm(own, after, form), residual, form.relu)
    # Without an addition the sign is found from y, which is read anyway.
    kept = result if form.relu and residual is not None else None
    return (result, own, others), (x, kernel, y, before, others, after, own, residual is not None, kept)


def _backward(form: Form, saved: Any, grads: Any) -> tuple[Any, ...]:
    x, kernel, y, before, others, after, own, has_residual, result = saved
    gradient, count = grads[0], len(x)
    relu = form.relu and result is None
    if result is not None:
        # As in batch_norm.py, where ">" would be the dearer question.
        gradient = jnp.where(result != 0, gradient, 0)
    norm = _norm(own, after, form)
    wide = gradient.astype(norm.mean.dtype)
    if relu:
        wide = jnp.where(is_positive(y, *norm), wide, 0)
    totals = sums(wide, wide * (y.astype(wide.dtype) - norm.mean), paired=True)
    after_grad, given = _gradients(norm, own, totals, count, form)

    incoming = Incoming(gradient, y, given)
    entering = None if before is None else _norm(others, before, form)
    inputs = None if entering is None else (x, entering)
    image, totals = image_gradient(incoming, kernel.astype(x.dtype), inputs, relu=relu, interpret=form.interpret)
    by_kernel = kernel_gradient(x, entering, incoming, relu=relu, interpret=form.interpret).astype(kernel.dtype)
    before_grad = None
    if entering is not None:
        before_grad, through = _gradients(entering, others, totals, count, form)
        wide = image.astype(entering.mean.dtype) - through.shift
        own_grad = entering.multiplier * (wide - (x.astype(wide.dtype) - entering.mean) * through.slope)
        image = own_grad.astype(x.dtype)
    return image, by_kernel, before_grad, after_grad, gradient if has_residual else None


_fused.defvjp(_forward, _backward)


def _norm(statistics: Pair, parameters: Pair, form: Form) -> Norm:
    (mean, var), (scale, bias) = statistics, parameters
    return Norm(mean, lax.rsqrt(var + form.epsilon) * scale, bias)


def _gradients(norm: Norm, statistics: Pair, totals: Pair, count: int, form: Form) -> tuple[Pair, NormGradient]:
    """The gradients by scale and bias of a norm, and that by its input, from the sums of that by its result."""
    (total, moment), deviation = totals, lax.rsqrt(statistics[1] + form.epsilon)
    given = NormGradient(norm, *through_statistics(totals, deviation, count, form.axis_name))
    return (moment * deviation, total), given
