"""The blocks of a residual network: their convolutions, and the shortcut past them."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.models.ops.conv_norm import ModuleFactory, nearest_multiple


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block.

    Attributes:
        kernel: the side of the kernel.
        expansion: the number of features, as a multiple of the block's `features`.
        strided: whether this convolution has the block's stride.
        groups: the number of groups of channels.
    """

    kernel: int
    expansion: int = 1
    strided: bool = False
    groups: int = 1


class ResidualBlock(nn.Module):
    """A residual block, relu(shortcut(x) + f(x)), where f is the block's convolutions, each with a batch norm.

    Attributes:
        convolutions: the convolutions of f; a `strided` one has the block's stride.
        features: the number of features of a convolution with expansion 1. The output has `features` times the last
            expansion.
        stride: 1, or 2 to halve the height and the width.
        zero_init_last_scale: initialize the last scale to zero, so that the block starts as the identity.
        conv, norm: factories of the layers; see `ResNet.layers`.
        shortcut_norm: whether a shortcut that changes the shape has a batch norm after its convolution. Otherwise the
            convolution has a bias.
        pooled_shortcut: whether a shortcut with a stride takes the mean of 2x2 pixels before its convolution, which
            then has no stride.
        squeeze: a factory of squeeze and excitation before the addition, which squeezes to a sixteenth of the features,
            as timm does; None for none.
    """

    convolutions: tuple[Convolution, ...]
    features: int
    stride: int
    zero_init_last_scale: bool
    conv: ModuleFactory
    norm: ModuleFactory
    shortcut_norm: bool = True
    pooled_shortcut: bool = False
    squeeze: ModuleFactory | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, last = x, len(self.convolutions)
        for i, convolution in enumerate(self.convolutions, start=1):
            features = self.features * convolution.expansion
            stride = self.stride if convolution.strided else 1
            options = {"kernel": convolution.kernel, "stride": stride, "groups": convolution.groups}
            y = self.conv(features, **options, name=f"conv{i}")(y)
            if i < last:
                y = self.norm(name=f"bn{i}")(y, relu=True)
        scale_init = nn.initializers.zeros if self.zero_init_last_scale else nn.initializers.ones
        norm = self.norm(name=f"bn{last}", scale_init=scale_init)
        if self.squeeze is None:
            return norm(y, residual=self.shortcut(x, y.shape), relu=True)
        squeezed = nearest_multiple(y.shape[-1] / 16, least=0)
        y = self.squeeze(squeezed, name="se")(norm(y))
        return nn.relu(self.shortcut(x, y.shape) + y)

    def shortcut(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Convert the input to the shape of the output."""
        if x.shape == shape:
            return x
        stride = self.stride
        if self.pooled_shortcut and stride == 2:
            x, stride = halve(x), 1
        options = {"kernel": 1, "stride": stride, "use_bias": not self.shortcut_norm}
        x = self.conv(shape[-1], **options, name="downsample_conv")(x)
        return self.norm(name="downsample_bn")(x) if self.shortcut_norm else x


def halve(images: jax.Array) -> jax.Array:
    """Take the means of squares of 2x2 pixels: [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), C].

    If a side is odd, the last means are those of the remaining pixels.
    """
    batch, height, width, channels = images.shape
    if height % 2 or width % 2:
        images = jnp.pad(images, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    squares = images.reshape(batch, (height + 1) // 2, 2, (width + 1) // 2, 2, channels)
    wide = jnp.promote_types(images.dtype, jnp.float32)
    return squares.mean((2, 4), dtype=wide).astype(images.dtype)
