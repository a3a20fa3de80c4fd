"""Layers that several networks share: convolutions, norms, squeeze and excitation, dropout, attention.

`convolutions` and `norms` return factories, so that a network chooses dtypes, initializers and operations once. The
padding of convolutions is PyTorch's.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxddp.core.errors import InputError
from jaxddp.models.ops.batch_norm import BatchNorm
from jaxddp.models.ops.operations import Operations

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


def convolutions(
    operations: Operations,
    kernel_init: nn.initializers.Initializer = WEIGHT_INITS["he_normal"],
    **dtypes: Any,
) -> ModuleFactory:
    """Return a factory of square convolutions, called as `conv(features, kernel=3, stride=1, name="conv1")(x)`.

    The padding is PyTorch's, which is symmetric for any stride, unlike "SAME". The factory also takes `groups`, the
    number of groups of channels, `use_bias=True`, and another `padding`. `dtypes` are `dtype` and `param_dtype`.
    """

    def conv(
        features: int,
        *,
        kernel: int,
        stride: int,
        name: str,
        groups: int = 1,
        use_bias: bool = False,
        padding: int | None = None,
    ) -> nn.Conv:
        padding = kernel // 2 if padding is None else padding
        return nn.Conv(
            features,
            (kernel, kernel),
            stride,
            padding,
            feature_group_count=groups,
            use_bias=use_bias,
            kernel_init=kernel_init,
            **dtypes,
            conv_general_dilated=operations.conv_general_dilated(stride, padding),
            name=name,
        )

    return conv


def norms(operations: Operations, train: bool, **settings: Any) -> ModuleFactory:
    """Return a factory of batch norms, called as `norm(name="bn1")(x)`.

    A norm also takes `residual=y`, which is added, and `relu=True`, which applies a ReLU last.

    Args:
        settings: further fields of `BatchNorm`, the same for all norms.
    """
    custom_gradient = operations.custom_norm_gradient
    return functools.partial(BatchNorm, use_running_average=not train, custom_gradient=custom_gradient, **settings)


class ConvNorm(nn.Module):
    """A convolution, a batch norm, and optionally an addition and an activation: activation(norm(conv(x)) + residual).

    Attributes:
        conv, norm: factories of the two layers, whose names are "conv" and "norm".
        features, kernel, stride, groups: see `convolutions`.
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
        conv = self.conv(self.features, kernel=self.kernel, stride=self.stride, groups=self.groups, name="conv")
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


class SqueezeExcitation(nn.Module):
    """x * gate(fc2(activation(fc1(mean of x over its pixels)))): [B, H, W, C] -> [B, H, W, C].

    Attributes:
        features: the number of features of the first layer.
        activation: the activation between the layers.
        gate: the activation of the second layer, whose result is the factor.
        dtype: the dtype of the layers and of the result. The mean is computed in float32 or wider.
    """

    features: int
    activation: Activation = nn.relu
    gate: Activation = nn.sigmoid
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        means = jnp.mean(x, axis=(1, 2), keepdims=True, dtype=wide).astype(x.dtype)
        squeezed = self.activation(self.layer(self.features, "fc1")(means))
        return x * self.gate(self.layer(x.shape[-1], "fc2")(squeezed))

    def layer(self, features: int, name: str) -> nn.Conv:
        return nn.Conv(
            features,
            (1, 1),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=WEIGHT_INITS["he_normal"],
            conv_general_dilated=_multiply,
            name=name,
        )


def _multiply(images: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """Compute a 1x1 convolution of images of one pixel as a product of matrices."""
    return images @ kernel[0, 0]


def branch_factors(rate: float, blocks: int, branches: int, example_keys: jax.Array | None) -> list[jax.Array | None]:
    """Return the factors of each block's branches, float32[B, branches] with mean 1; None if `rate` is 0.

    The factor is 0 if the example skips the branch. The factor depends only on the example's key.

    Args:
        rate: the probability of skipping in the last block, below 1.
        example_keys: random keys [B].

    Raises:
        InputError: `example_keys` is None, and `rate` is not 0.
    """
    if not rate:
        return [None] * blocks
    if example_keys is None:
        raise InputError("drop_path: in training every image needs its own random key; pass example_keys")
    skip_rates = np.linspace(0, rate, blocks, dtype=np.float32)[:, None]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (blocks, branches), jnp.float32))(example_keys)
    factors = (uniform >= skip_rates) / (1 - skip_rates)
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

    Raises:
        InputError: `example_keys` is None.
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
    wide = _wide(x)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    wide = _wide(x)
    density = jnp.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    return gelu(x), tangent * (_normal_cdf(wide) + wide * density).astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _normal_cdf(x: jax.Array) -> jax.Array:
    return (1 + lax.erf(x * math.sqrt(0.5))) / 2


# PyTorch's default initializer of a convolution's kernel.
_patch_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
dense_init = nn.initializers.normal(0.02)
"""The initializer of the kernels of dense layers."""


class Attention(nn.Module):
    """Multi-head self-attention: [..., N, D] -> [..., N, D]. The softmax is computed in float32 or wider."""

    heads: int
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Apply the attention among the N tokens of each group.

        Args:
            bias: numbers that are added to the scores, broadcastable to [..., heads, N, N]. The last axis is that of
                the keys.
        """
        *shape, width = x.shape
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=dense_init)
        qkv = dense(3 * width, name="qkv")(x).reshape(*shape, 3, self.heads, width // self.heads)
        query, key, value = (qkv[..., i, :, :] for i in range(3))
        # `jax.nn.dot_product_attention` is not used, because it computes its softmax in float32 even for float64
        # inputs.
        wide = jnp.promote_types(self.dtype, jnp.float32)
        scores = jnp.einsum("...qhd,...khd->...hqk", query, key, preferred_element_type=wide)
        scores = scores / query.shape[-1] ** 0.5
        shares = jax.nn.softmax(scores if bias is None else scores + bias).astype(self.dtype)
        x = jnp.einsum("...hqk,...khd->...qhd", shares, value)
        return dense(width, name="proj")(x.reshape(*shape, width))


class Mlp(nn.Module):
    """Two dense layers with a GELU between them: [..., D] -> [..., D]. There are 4 D hidden features."""

    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=dense_init)
        return dense(width, name="fc2")(gelu(dense(4 * width, name="fc1")(x)))


def patch_embedding(width: int, patch: int, **settings: Any) -> nn.Conv:
    """Return the layer that maps each patch of patch x patch pixels to one token: [B, H, W, C] -> [B, H', W', width].

    H' is H / patch. Height and width must be multiples of the patch side.
    """
    return nn.Conv(
        width,
        (patch, patch),
        patch,
        "VALID",
        kernel_init=_patch_init,
        conv_general_dilated=_patch_by_patch,
        name="patch_embed",
        **settings,
    )


def _patch_by_patch(images: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """Compute a convolution whose stride is its kernel size. This matrix product is faster on a CPU."""
    batch, height, width, channels = images.shape
    side = kernel.shape[0]
    patches = images.reshape(batch, height // side, side, width // side, side, channels)
    return jnp.einsum("bhiwjc,ijcd->bhwd", patches, kernel)
