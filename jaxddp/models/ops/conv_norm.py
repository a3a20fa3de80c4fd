"""The layers of a convolutional network: convolutions with PyTorch's padding, batch norms, and both with an activation.

`convolutions` and `norms` return factories, so that a network chooses dtypes, initializers and operations once.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.typing import DTypeLike

from jaxddp.models.ops.batch_norm import BatchNorm
from jaxddp.models.ops.operations import Operations

ModuleFactory = Callable[..., Callable[..., jax.Array]]
"""A function that returns a module, or a function of images that calls a module."""
Activation = Callable[[jax.Array], jax.Array]


def convolutions(
    operations: Operations,
    kernel_init: nn.initializers.Initializer,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
) -> ModuleFactory:
    """Return a factory of square convolutions, called as `conv(features, kernel=3, stride=1, name="conv1")(x)`.

    The padding is PyTorch's, which is symmetric for any stride, unlike "SAME". The factory also takes `groups`, the
    number of groups of channels, `use_bias=True`, and another `padding`.
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
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
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
