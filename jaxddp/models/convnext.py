"""ConvNeXts and ConvNeXts V2 for image classification, in Flax Linen.

Sources: Liu et al. 2022, "A ConvNet for the 2020s" (arXiv:2201.03545), and Woo et al. 2023, "ConvNeXt V2"
(arXiv:2301.00808). Parameters, initial distributions and logits equal those of torchvision's `convnext_tiny` to
`convnext_large`, and of timm's networks of the same names.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.models.network import Naming, Network, check_sides, stage_blocks, timm_naming, torchvision_naming
from jaxddp.models.ops.layers import Layer, ModuleFactory, add_branch, branch_factors, dense_init, gelu


@dataclass(frozen=True)
class ConvNeXtSize:
    """A ConvNeXt.

    Attributes:
        stages: the number of blocks in each of the four stages.
        width: the number of features of the first stage.
        response_norm: whether the MLPs have a global response norm and the blocks no layer scale, as in V2.
        convolutions: whether published weights have the layers of the MLPs as 1x1 convolutions.
    """

    stages: tuple[int, ...]
    width: int = 96
    response_norm: bool = False
    convolutions: bool = False


_SMALL = {"atto": ((2, 2, 6, 2), 40), "femto": ((2, 2, 6, 2), 48), "pico": ((2, 2, 6, 2), 64)}
_SMALL |= {"nano": ((2, 2, 8, 2), 80)}
_LARGE = {"tiny": ((3, 3, 9, 3), 96), "small": ((3, 3, 27, 3), 96), "base": ((3, 3, 27, 3), 128)}
_LARGE |= {"large": ((3, 3, 27, 3), 192), "xlarge": ((3, 3, 27, 3), 256), "huge": ((3, 3, 27, 3), 352)}
SIZES = {
    f"convnext{version}_{name}": ConvNeXtSize(*size, response_norm=bool(version), convolutions=name in _SMALL)
    for version in ("", "v2")
    for name, size in (_SMALL | _LARGE).items()
}

_LEAST_SIDE = 32
_STAGES = range(4)

TORCHVISION = torchvision_naming(
    ("stem/conv", "features.0.0"),
    ("stem/norm", "features.0.1"),
    *((f"downsample{i}/norm", f"features.{2 * i}.0") for i in _STAGES[1:]),
    *((f"downsample{i}/conv", f"features.{2 * i}.1") for i in _STAGES[1:]),
    *((f"stage{i}_(\\d+)/layer_scale", rf"features.{2 * i + 1}.\1.layer_scale") for i in _STAGES),
    *((f"stage{i}_(\\d+)", rf"features.{2 * i + 1}.\1.block") for i in _STAGES),
    ("block/conv", "block.0"),
    ("block/norm", "block.2"),
    ("block/fc1", "block.3"),
    ("block/fc2", "block.5"),
    ("^norm", "classifier.0"),
    ("^head", "classifier.2"),
)
TIMM = timm_naming(
    ("stem/conv", "stem.0"),
    ("stem/norm", "stem.1"),
    (r"downsample(\d)/norm", r"stages.\1.downsample.0"),
    (r"downsample(\d)/conv", r"stages.\1.downsample.1"),
    (r"stage(\d)_(\d+)", r"stages.\1.blocks.\2"),
    ("layer_scale", "gamma"),
    ("/conv/", "/conv_dw/"),
    (r"/(fc\d|grn)", r"/mlp.\1"),
    ("^norm", "head.norm"),
    ("^head/", "head.fc/"),
)


class ResponseNorm(Layer):
    """x + scale * x * n + bias: [B, H, W, C] -> [B, H, W, C]. n is the norm of a channel over their mean norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(self.wide["dtype"])
        # The derivative of a square root is infinite at zero.
        squares = jnp.maximum(jnp.sum(wide * wide, axis=(1, 2), keepdims=True), jnp.finfo(wide.dtype).tiny)
        norms = jnp.sqrt(squares)
        shape, names = x.shape[-1:], ("scale", "bias")
        scale, bias = (self.param(name, nn.initializers.zeros, shape, self.param_dtype) for name in names)
        return (wide + scale * wide * (norms / (norms.mean(-1, keepdims=True) + 1e-6)) + bias).astype(x.dtype)


class ConvNeXtBlock(Layer):
    """x + scaled(MLP(norm(depthwise 7x7 convolution of x))): [B, H, W, C] -> [B, H, W, C]."""

    conv: ModuleFactory
    size: ConvNeXtSize

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Apply the block. `factors`, [B, 1], multiply the branch; see `branch_factors`."""
        features = x.shape[-1]
        y = self.conv(features, kernel=7, stride=1, feature_group_count=features, use_bias=True, name="conv")(x)
        y = nn.LayerNorm(name="norm", use_fast_variance=False, **self.dtypes)(y)
        one = {"kernel": 1, "stride": 1, "use_bias": True} if self.size.convolutions else {}
        layer = self.conv if one else self.dense
        y = gelu(layer(4 * features, name="fc1", **one)(y))
        y = ResponseNorm(name="grn", **self.dtypes)(y) if self.size.response_norm else y
        y = layer(features, name="fc2", **one)(y)
        if self.size.response_norm:
            return add_branch(x, y, factors)
        scale = self.param("layer_scale", nn.initializers.constant(1e-6), (features,), self.param_dtype)
        return add_branch(x, y * scale.astype(y.dtype), factors)


class Downsample(Layer):
    """A convolution whose stride is the kernel size. A norm comes before the convolution or, in the stem, after it."""

    features: int
    stride: int
    norm_first: bool
    conv: ModuleFactory

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = nn.LayerNorm(name="norm", use_fast_variance=False, **self.dtypes)
        conv = self.conv(self.features, kernel=self.stride, stride=self.stride, padding=0, use_bias=True, name="conv")
        return conv(norm(x)) if self.norm_first else norm(conv(x))


class ConvNeXt(Network):
    """A ConvNeXt: four stages of blocks. Each stage after the first halves height and width and doubles the features.

    Attributes:
        drop_path: the probability that an example skips the last block in training.
    """

    size: ConvNeXtSize
    num_classes: int
    drop_path: float = 0.0

    def published_names(self) -> tuple[Naming, ...]:
        """Return the namings of torchvision, if it has the network, and timm; see `jaxddp.models.network`."""
        return (TIMM,) if self.size.response_norm or self.size.convolutions else (TORCHVISION, TIMM)

    def blocks(self) -> list[tuple[str, ...]]:
        """Return the modules of each block. The paper's code groups three blocks of the third stage into one layer."""
        return stage_blocks(self.size.stages, first=0, between="downsample")

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C], H and W at least 32, to logits [B, num_classes] in float32 or wider.

        Args:
            example_keys: random keys [B], required in training with `drop_path`.

        Raises: InputError if the images are too small, or the keys are missing.
        """
        check_sides("convnext", images, _LEAST_SIDE)
        factors = iter(branch_factors(self.drop_path if train else 0, sum(self.size.stages), 1, example_keys))
        settings = {"conv": self.layers(train, dense_init)[0], **self.dtypes}
        x = Downsample(self.size.width, 4, norm_first=False, name="stem", **settings)(images.astype(self.dtype))
        for stage, size in enumerate(self.size.stages):
            if stage:
                x = Downsample(self.size.width * 2**stage, 2, norm_first=True, name=f"downsample{stage}", **settings)(x)
            for block in range(size):
                x = ConvNeXtBlock(name=f"stage{stage}_{block}", size=self.size, **settings)(x, next(factors))
        x = nn.LayerNorm(name="norm", use_fast_variance=False, **self.wide)(self.mean(x))
        return self.dense(self.num_classes, "head", **self.wide)(x)
