"""Layers that several networks share, and operations whose implementation depends on the platform."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxddp.core.errors import InputError
from jaxddp.models.interface import as_wide

_IN_BOUNDS = "promise_in_bounds"
_NOWHERE = 255
"""A position that no pixel of a window has."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Take the maximum over square windows: [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C] by default.

    Images may have any float dtype with infinities. Values and gradients equal those of `flax.linen.max_pool`: of
    several equal maxima, the first in row-major order gets the whole gradient. Flax's gradient (select and scatter) is
    a serial loop on CPUs, and reads the images again on GPUs. Here a uint8 for each output stores the index of the
    maximum. Only reverse-mode differentiation is supported, not `jax.jvp`.
    A window has at most 15x15 pixels, whose positions and `_NOWHERE` fit into a uint8.
    """
    return max_pool_with_positions(images, window, stride, padding)[0]


def max_pool_with_positions(
    images: jax.Array, window: int, stride: int, padding: int
) -> tuple[jax.Array, tuple[jax.Array, tuple[int, ...]]]:
    """Return the maxima, and what `max_pool_gradient` needs: uint8 positions in the windows and the images' shape."""
    margins = [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)]
    padded = lax.pad(images, jnp.array(-math.inf, images.dtype), margins)
    pixels = pixels_of_windows(padded, (window, window), stride)
    largest = next(pixels)
    which = lax.full_like(largest, 0, jnp.uint8)
    for number, pixel in enumerate(pixels, start=1):
        # A maximum of NaN stays NaN, because no comparison with NaN is true.
        larger = (pixel > largest) | jnp.isnan(pixel)
        largest = jnp.where(larger, pixel, largest)
        which = jnp.where(larger, jnp.uint8(number), which)
    return largest, (which, images.shape)


def max_pool_gradient(window: int, stride: int, padding: int, saved: Any, grads: jax.Array) -> tuple[jax.Array]:
    """Return the gradient of the images of `max_pool_with_positions`, from that of the maxima."""
    which, (_, height, width, _) = saved
    zero = jnp.zeros((), grads.dtype)

    def gradient(rows: _Windows, columns: _Windows) -> jax.Array:
        """Return the gradient from one window of each pixel; it is zero if another pixel is the window's maximum."""
        at = slice(None), rows.numbers[:, None], columns.numbers
        position = rows.positions[:, None] * window + columns.positions
        position = np.where(rows.covers[:, None] & columns.covers, position, _NOWHERE).astype(np.uint8)
        is_maximum = which.at[at].get(mode=_IN_BOUNDS) == position[..., None]
        return jnp.where(is_maximum, grads.at[at].get(mode=_IN_BOUNDS), zero)

    sides = zip((height, width), grads.shape[1:3], strict=True)
    rows, columns = (_windows_of_pixels(side, count, window, stride, padding) for side, count in sides)
    return (functools.reduce(jnp.add, itertools.starmap(gradient, itertools.product(rows, columns))),)


class _Windows(NamedTuple):
    """One window for each pixel along an axis."""

    numbers: np.ndarray
    """int64[side], the number of the window; any number in bounds if there is no such window."""
    positions: np.ndarray
    """int64[side], the position of the pixel in the window."""
    covers: np.ndarray
    """bool[side], whether the window exists and contains the pixel."""


def _windows_of_pixels(side: int, count: int, window: int, stride: int, padding: int) -> list[_Windows]:
    """Return the windows that contain each pixel of an axis, in the order of the pixel's position in them.

    The gradient gathers these few windows for each pixel. The sum of one padded array for each position in a window
    takes several times as many instructions on a GPU.
    """
    pixels, found = np.arange(side), []
    first, last = -((window - 1 - padding) // stride), (stride - 1 + padding) // stride
    for distance in range(last, first - 1, -1):
        numbers = pixels // stride + distance
        positions = pixels + padding - numbers * stride
        covers = (numbers >= 0) & (numbers < count) & (positions >= 0) & (positions < window)
        found.append(_Windows(numbers.clip(0, count - 1), positions, covers))
    return found


max_pool.defvjp(max_pool_with_positions, max_pool_gradient)


def pixels_of_windows(images: jax.Array, shape: tuple[int, ...], stride: int) -> Iterator[jax.Array]:
    """Yield the pixels at each position within windows of images [..., H, W, C], in row-major order: [..., H', W', C].

    Args:
        shape: begins with the height and the width of a window.
    """
    *batch, height, width, channels = images.shape
    rows, columns = ((side - size) // stride * stride + 1 for side, size in zip((height, width), shape, strict=False))
    none, steps = [0] * len(batch), [*[1] * len(batch), stride, stride, 1]
    for row, column in np.ndindex(*shape[:2]):
        yield lax.slice(images, (*none, row, column, 0), (*batch, row + rows, column + columns, channels), steps)


# Type checkers do not accept a `jax.custom_vjp` as a callable.
Convolution: TypeAlias = Any
"""(images [B, H, W, C], kernel [k, k, C, F], stride, padding) -> [B, H', W', F]."""
MaxPool: TypeAlias = Any
"""(images [B, H, W, C], window, stride, padding) -> [B, H', W', C]."""


def flax_max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Take the maximum over square windows by `flax.linen.max_pool`, whose gradient is XLA's select and scatter."""
    # Flax annotates paddings as a string.
    margins: Any = ((padding, padding), (padding, padding))
    return nn.max_pool(images, (window, window), (stride, stride), margins)


@dataclass(frozen=True)
class Operations:
    """The implementations that a network uses.

    Attributes:
        convolution: the function that computes convolutions; None for Flax's default.
        grouped_convolution: the function with the arguments of `lax.conv_general_dilated` that computes convolutions in
            grouped channels in networks of users; None for Flax's default.
        max_pool: the function that computes max pooling. In training with the custom gradient, a norm before it
            computes it.
        custom_norm_gradient: whether batch norms use the custom gradient of `jaxddp.models.ops.batch_norm`.
    """

    convolution: Convolution | None = None
    grouped_convolution: Convolution | None = None
    max_pool: MaxPool = max_pool
    custom_norm_gradient: bool = True

    def conv_general_dilated(self, stride: int, padding: int) -> Callable[..., jax.Array] | None:
        """Return the argument `conv_general_dilated` of `flax.linen.Conv` for one stride and padding."""
        convolution = self.convolution
        if convolution is None:
            return None
        return lambda images, kernel, *_, **__: convolution(images, kernel, stride, padding)


WEIGHT_INITS = {
    "he_normal": nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    "he_uniform": nn.initializers.variance_scaling(2.0, "fan_out", "uniform"),
    "xavier_normal": nn.initializers.variance_scaling(1.0, "fan_avg", "normal"),
    "xavier_uniform": nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    "lecun_normal": nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
    "lecun_uniform": nn.initializers.lecun_uniform(),
    "orthogonal": nn.initializers.orthogonal(2.0**0.5),
}
ModuleFactory = Callable[..., Callable[..., jax.Array]]
"""A function that returns a module, or a function of images that calls a module."""
Activation = Callable[[jax.Array], jax.Array]


# PyTorch's default initializer of a convolution's kernel.
patch_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
dense_init = nn.initializers.normal(0.02)
"""The initializer of the kernels of dense layers."""


class Layer(nn.Module, kw_only=True):
    """A module that passes its dtypes to its layers.

    Attributes:
        dtype: the dtype of the computation and of the result.
        param_dtype: the dtype of parameters and running statistics (float64 for exact comparisons, with
            `jax_enable_x64`).
    """

    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @property
    def dtypes(self) -> dict[str, Any]:
        """The fields `dtype` and `param_dtype` of a layer."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def wide(self) -> dict[str, Any]:
        """The same fields, for a layer that computes in float32 or wider."""
        return self.dtypes | {"dtype": jnp.promote_types(self.dtype, jnp.float32)}

    def dense(self, features: int, name: str, **settings: Any) -> nn.Dense:
        """Return a dense layer. `settings` are other fields of it than the default ones."""
        return nn.Dense(features, name=name, **{**self.dtypes, "kernel_init": dense_init, **settings})


class ConvNorm(nn.Module):
    """A convolution, a batch norm, and optionally an addition and an activation: activation(norm(conv(x)) + residual).

    Attributes:
        conv, norm: factories of the two layers, whose names are "conv" and "norm".
        features, kernel, stride, groups: see `jaxddp.models.network.Network.layers`.
        activation: the activation; None for none.
    """

    conv: ModuleFactory
    norm: ModuleFactory
    features: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    activation: Activation | None = None

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Map images [B, H, W, C] to [B, ceil(H / stride), ceil(W / stride), features]."""
        settings = {"feature_group_count": self.groups, "name": "conv"}
        conv = self.conv(self.features, kernel=self.kernel, stride=self.stride, **settings)
        # The norm's gradient includes that of a ReLU.
        is_relu = self.activation is nn.relu
        y = self.norm(name="norm")(conv(x), residual=residual, relu=is_relu)
        return y if is_relu or self.activation is None else self.activation(y)


def nearest_multiple(features: float, divisor: int = 8, least: float = 0.9) -> int:
    """Return the multiple of `divisor` that is nearest to a number of features, as MobileNets do.

    The result is at least `divisor`. The next multiple replaces a result below `least` times the number.
    """
    nearest = max(divisor, int(features + divisor / 2) // divisor * divisor)
    return nearest if nearest >= least * features else nearest + divisor


class SqueezeExcitation(Layer):
    """x * gate(fc2(activation(fc1(mean of x over its pixels)))): [B, H, W, C] -> [B, H, W, C].

    Attributes:
        features: the number of features of the first layer.
        activation: the activation between the layers.
        gate: the activation of the second layer, whose result is the factor.

    The mean is computed in float32 or wider.
    """

    features: int
    activation: Activation = nn.relu
    gate: Activation = nn.sigmoid

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        settings = {"kernel_init": WEIGHT_INITS["he_normal"], "conv_general_dilated": _multiply, **self.dtypes}
        means = jnp.mean(x, axis=(1, 2), keepdims=True, dtype=self.wide["dtype"]).astype(x.dtype)
        squeezed = self.activation(nn.Conv(self.features, (1, 1), name="fc1", **settings)(means))
        return x * self.gate(nn.Conv(x.shape[-1], (1, 1), name="fc2", **settings)(squeezed))


def _multiply(images: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """Compute a 1x1 convolution of images of one pixel as a product of matrices."""
    return images @ kernel[0, 0]


def branch_factors(rate: float, blocks: int, branches: int, example_keys: jax.Array | None) -> list[jax.Array | None]:
    """Return the factors of each block's branches, float32[B, branches] with mean 1; None if `rate` is 0.

    The factor is 0 if the example skips the branch. The factor depends only on the example's key.

    Args:
        rate: the probability of skipping in the last block, below 1.
        example_keys: random keys [B].

    Raises: InputError if `example_keys` is None, and `rate` is not 0.
    """
    if not rate:
        return [None] * blocks
    if example_keys is None:
        raise InputError("drop_path: in training every image needs its own random key; pass example_keys")
    skip_rates = np.linspace(0, rate, blocks, dtype=np.float32)[:, None]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (blocks, branches), jnp.float32))(example_keys)
    factors = (uniform >= skip_rates).astype(jnp.float32) / (1 - skip_rates)
    return [factors[:, block] for block in range(blocks)]


def add_branch(x: jax.Array, branch: jax.Array, factors: jax.Array | None) -> jax.Array:
    """Return x + branch, both [B, ...]. If `factors`, [B] or [B, 1], is not None, the branch is multiplied by it."""
    if factors is None:
        return x + branch
    return x + branch * factors.astype(branch.dtype).reshape(-1, *[1] * (branch.ndim - 1))


# Stochastic depth draws from the example's key itself.
_STREAM = 1


def dropout(features: jax.Array, rate: float, example_keys: jax.Array | None) -> jax.Array:
    """Set each feature to zero with probability `rate`, and scale the others: float[B, F] -> float[B, F].

    The mean of a result is its input.

    Args:
        rate: a probability below 1.
        example_keys: random keys [B].

    Raises: InputError if `example_keys` is None.
    """
    if example_keys is None:
        raise InputError("dropout: in training every image needs its own random key; pass example_keys")
    stream = jax.vmap(lambda key: jax.random.fold_in(key, _STREAM))(example_keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, features.shape[1:], jnp.float32))(stream)
    return jnp.where(uniform >= rate, features / (1 - rate), 0)


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Compute GELU with erf, as PyTorch does, in the dtype of `x`. Intermediate values are float32 or wider.

    The derivative is custom, because JAX 0.12 cannot trace the derivative of erf inside `shard_map`.
    """
    wide = as_wide(x)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    wide = as_wide(x)
    density = jnp.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    return gelu(x), tangent * (_normal_cdf(wide) + wide * density).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return (1 + lax.erf(x * math.sqrt(0.5))) / 2


_ABOVE = [2.29050653e-4, 3.40829091e-3, 5.09556951e-2, 1.85208321e-1, 1.12837911]
_BELOW = [-1.17916031e-7, 2.35479657e-5, 1.01796256e-3, 1.40704699e-2, 1.10985048e-1, 4.97469246e-1, 1.0]


def polynomial_erf(x: jax.Array) -> jax.Array:
    """Compute `lax.erf` in float32 as XLA does, by two polynomials, for programs that lack this operation."""
    x = jnp.clip(x, -3.8325069, 3.8325069)
    return x * jnp.polyval(jnp.array(_ABOVE, x.dtype), x * x) / jnp.polyval(jnp.array(_BELOW, x.dtype), x * x)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Compute x * sigmoid(1.702 x), the GELU of OpenAI's CLIP."""
    return x * nn.sigmoid(1.702 * x)


class Attention(Layer):
    """Multi-head self-attention: [..., N, D] -> [..., N, D]. The softmax is computed in float32 or wider."""

    heads: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None = None, angles: np.ndarray | None = None) -> jax.Array:
        """Apply the attention among the N tokens of each group.

        Args:
            bias: numbers that are added to the scores, broadcastable to [..., heads, N, N]. The last axis is that of
                the keys.
            angles: the angles by which `rotate` turns queries and keys.
        """
        *shape, width = x.shape
        qkv = self.dense(3 * width, "qkv", use_bias=self.use_bias)(x)
        qkv = qkv.reshape(*shape, 3, self.heads, width // self.heads)
        query, key, value = (qkv[..., i, :, :] for i in range(3))
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        return self.dense(width, "proj")(attend(query, key, value, bias))


def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return the values by attention: [..., Q, heads, d], [..., K, heads, d] twice -> [..., Q, heads * d]."""
    # `jax.nn.dot_product_attention` is not used, because it computes its softmax in float32 even for float64 inputs.
    scores = _scores(query, key) / query.shape[-1] ** 0.5
    shares = jax.nn.softmax(scores if bias is None else scores + bias).astype(value.dtype)
    x = jnp.einsum("...hqk,...khd->...qhd", shares, value)
    return x.reshape(*x.shape[:-2], -1)


_products = functools.partial(jnp.einsum, "...qhd,...khd->...hqk")


@jax.custom_jvp
def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    return _products(query, key, preferred_element_type=jnp.promote_types(query.dtype, jnp.float32))


@_scores.defjvp
def _scores_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    # JAX's rule would multiply the gradient of the scores with queries and keys that are cast to float32.
    (query, key), (query_tangent, key_tangent) = primals, tangents
    scores, tangent = _scores(query, key), _products(query_tangent, key) + _products(query, key_tangent)
    return scores, tangent.astype(scores.dtype)


def rotary_angles(rows: int, columns: int, features: int) -> np.ndarray:
    """Return the angles of DINOv3 for a grid of patches: [rows * columns, features / 2], float64.

    Source: Siméoni et al. 2025, arXiv:2508.10104. Coordinates are from -1 to 1. The periods are 100^0 to 100^1, and are
    rounded to float32 like the coordinates, as in timm.

    Args:
        features: the number of features of an attention head, a multiple of 4.
    """
    of_axes = [2 * (np.arange(0.5, side, dtype=np.float32) / np.float32(side)) - 1 for side in (rows, columns)]
    places = np.stack(np.meshgrid(*of_axes, indexing="ij"), axis=-1).reshape(-1, 2, 1).astype(np.float64)
    periods = (100.0 ** (np.arange(features // 4) * 4 / features)).astype(np.float32)
    return (2 * math.pi * places / periods).reshape(-1, features // 2)


def rotate(x: jax.Array, angles: np.ndarray) -> jax.Array:
    """Turn features i and i + d / 2 of the last P of N tokens by angle i: [..., N, heads, d] -> [..., N, heads, d].

    Args:
        angles: [P, d / 2].
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (jnp.asarray(function(angles), wide)[:, None] for function in (np.cos, np.sin))
    first = x.shape[-3] - len(angles)
    one, other = jnp.split(x[..., first:, :, :].astype(wide), 2, axis=-1)
    turned = jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    return jnp.concatenate([x[..., :first, :, :], turned.astype(x.dtype)], axis=-3)


class AttentionPool(Layer):
    """Attention of one learned query, and an MLP: [B, N, D] -> [B, D]. The head of SigLIP's image towers.

    Attributes:
        heads: the number of heads.
        epsilon: see `nn.LayerNorm`.
        mlp: the fields of the MLP.
    """

    heads: int
    epsilon: float
    mlp: Mapping[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, _, width = x.shape
        latent = self.param("latent_token", nn.initializers.normal(width**-0.5), (1, 1, width), self.param_dtype)
        latent = jnp.broadcast_to(latent.astype(x.dtype), (batch, 1, width))
        query = self.dense(width, "q")(latent).reshape(batch, 1, self.heads, -1)
        both = self.dense(2 * width, "kv")(x).reshape(batch, -1, 2, self.heads, width // self.heads)
        key, value = both[:, :, 0], both[:, :, 1]
        x = self.dense(width, "proj")(attend(query, key, value))
        y = nn.LayerNorm(self.epsilon, name="norm", use_fast_variance=False, **self.dtypes)(x)
        return (x + Mlp(**self.mlp, name="mlp", **self.dtypes)(y))[:, 0]


class Mlp(Layer):
    """Two dense layers with an activation between them: [..., D] -> [..., D].

    Attributes:
        hidden: the number of hidden features; None for 4 D.
        activation: the activation.
        gate: "none"; or the activation of one layer multiplies another one: "packed", if the two layers are one with
            twice the features; "split", if they are two.
    """

    hidden: int | None = None
    activation: Activation = gelu
    gate: Literal["none", "packed", "split"] = "none"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        hidden = self.hidden or 4 * width
        if self.gate == "split":
            y = self.activation(self.dense(hidden, "fc1_g")(x)) * self.dense(hidden, "fc1_x")(x)
        elif self.gate == "packed":
            gates, y = jnp.split(self.dense(2 * hidden, "fc1")(x), 2, axis=-1)
            y = self.activation(gates) * y
        else:
            y = self.activation(self.dense(hidden, "fc1")(x))
        return self.dense(width, "fc2")(y)


def patch_embedding(width: int, patch: int, **settings: Any) -> nn.Conv:
    """Return the layer that maps each patch of patch x patch pixels to one token: [B, H, W, C] -> [B, H', W', width].

    H' is H / patch. Height and width must be multiples of the patch side.
    """
    settings |= {"kernel_init": patch_init, "conv_general_dilated": _patch_by_patch, "name": "patch_embed"}
    return nn.Conv(width, (patch, patch), patch, "VALID", **settings)


def _patch_by_patch(images: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """Compute a convolution whose stride is its kernel size. This matrix product is faster on a CPU."""
    batch, height, width, channels = images.shape
    side = kernel.shape[0]
    patches = images.reshape(batch, height // side, side, width // side, side, channels)
    return jnp.einsum("bhiwjc,ijcd->bhwd", patches, kernel)
