"""ConvNeXt-T and ConvNeXt-S for image classification, in Flax Linen.

Source: Liu et al. 2022, "A ConvNet for the 2020s" (arXiv:2201.03545). Parameters, initial distributions and logits
equal those of torchvision's `convnext_tiny` and `convnext_small`. timm's versions give the same logits.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.models.network import Naming, Network, check_sides, naming, stage_blocks
from jaxddp.models.ops.layers import ModuleFactory, Operations, add_branch, branch_factors, convolutions, gelu

STAGE_SIZES = {"convnext_tiny": (3, 3, 9, 3), "convnext_small": (3, 3, 27, 3)}
"""The number of blocks in each of the four stages."""

_LEAST_SIDE = 32
_STAGES = range(4)

TORCHVISION = naming(
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
TIMM = naming(
    ("stem/conv", "stem.0"),
    ("stem/norm", "stem.1"),
    (r"downsample(\d)/norm", r"stages.\1.downsample.0"),
    (r"downsample(\d)/conv", r"stages.\1.downsample.1"),
    (r"stage(\d)_(\d+)", r"stages.\1.blocks.\2"),
    ("layer_scale", "gamma"),
    ("/conv/", "/conv_dw/"),
    (r"/fc(\d)", r"/mlp.fc\1"),
    ("^norm", "head.norm"),
    ("^head/", "head.fc/"),
)

_kernel_init = nn.initializers.normal(0.02)


class ConvNeXtBlock(nn.Module):
    """x + scaled(MLP(norm(depthwise 7x7 convolution of x))): [B, H, W, C] -> [B, H, W, C]."""

    conv: ModuleFactory
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Apply the block. `factors`, [B, 1], multiply the branch; see `branch_factors`."""
        features = x.shape[-1]
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        weights = {"kernel_init": _kernel_init, **dtypes}
        y = self.conv(features, kernel=7, stride=1, groups=features, use_bias=True, name="conv")(x)
        y = nn.LayerNorm(name="norm", use_fast_variance=False, **dtypes)(y)
        y = gelu(nn.Dense(4 * features, name="fc1", **weights)(y))
        y = nn.Dense(features, name="fc2", **weights)(y)
        scale = self.param("layer_scale", nn.initializers.constant(1e-6), (features,), self.param_dtype)
        return add_branch(x, y * scale.astype(y.dtype), factors)


class Downsample(nn.Module):
    """A convolution whose stride is the kernel size. A norm comes before the convolution or, in the stem, after it."""

    features: int
    stride: int
    norm_first: bool
    conv: ModuleFactory
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = nn.LayerNorm(name="norm", dtype=self.dtype, param_dtype=self.param_dtype, use_fast_variance=False)
        conv = self.conv(self.features, kernel=self.stride, stride=self.stride, padding=0, use_bias=True, name="conv")
        return conv(norm(x)) if self.norm_first else norm(conv(x))


class ConvNeXt(Network):
    """A ConvNeXt: four stages of blocks. Each stage after the first halves height and width and doubles the features.

    Attributes:
        stage_sizes: the number of blocks in each stage.
        width: the number of features of the first stage.
        drop_path: the probability that an example skips the last block in training.
        dtype: the dtype of the computation. The mean over pixels, the last norm and the head use float32 or wider.
        param_dtype: the dtype of parameters (float64 for exact comparisons, with `jax_enable_x64`).
        operations: the implementations of the operations; None for the defaults. See `jaxddp.platforms`.
    """

    stage_sizes: tuple[int, ...]
    num_classes: int
    width: int = 96
    drop_path: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    operations: Operations | None = None

    def published_names(self) -> tuple[Naming, ...]:
        """Return the namings of torchvision and timm; see `jaxddp.models.network`."""
        return TORCHVISION, TIMM

    def blocks(self) -> list[tuple[str, ...]]:
        """Return the modules of each block. The paper's code groups three blocks of the third stage into one layer."""
        return stage_blocks(self.stage_sizes, first=0, between="downsample")

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C], H and W at least 32, to logits [B, num_classes] in float32 or wider.

        Args:
            example_keys: random keys [B], required in training with `drop_path`.

        Raises:
            InputError: the images are too small, or the keys are missing.
        """
        check_sides("convnext", images, _LEAST_SIDE)
        factors = iter(branch_factors(self.drop_path if train else 0, sum(self.stage_sizes), 1, example_keys))
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        settings = {"conv": convolutions(self.operations or Operations(), _kernel_init, **dtypes), **dtypes}
        x = Downsample(self.width, 4, norm_first=False, name="stem", **settings)(images.astype(self.dtype))
        for stage, size in enumerate(self.stage_sizes):
            if stage:
                x = Downsample(self.width * 2**stage, 2, norm_first=True, name=f"downsample{stage}", **settings)(x)
            for block in range(size):
                x = ConvNeXtBlock(name=f"stage{stage}_{block}", **settings)(x, next(factors))
        head_dtype = jnp.promote_types(self.dtype, jnp.float32)
        wide: dict[str, Any] = {"dtype": head_dtype, "param_dtype": self.param_dtype}
        x = jnp.mean(x, axis=(1, 2), dtype=head_dtype)
        x = nn.LayerNorm(name="norm", use_fast_variance=False, **wide)(x)
        return nn.Dense(self.num_classes, kernel_init=_kernel_init, name="head", **wide)(x)
