"""Squeeze and excitation: a factor for each channel of an image, computed from the means of all its channels.

Source: Hu et al. 2018, "Squeeze-and-excitation networks" (arXiv:1709.01507). The names and the shapes of the parameters
are those of torchvision and timm, where both layers are 1x1 convolutions with a bias.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.models.ops.conv_norm import Activation
from jaxddp.models.settings import WEIGHT_INITS


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
