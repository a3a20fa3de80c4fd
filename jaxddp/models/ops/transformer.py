"""The layers that vision transformers share: patches, attention and the MLP of a block."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.models.ops.gelu import gelu

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
