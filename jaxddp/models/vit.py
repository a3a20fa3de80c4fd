"""Vision transformers for image classification: ViT-Ti/16, S/16 and B/16, in Flax Linen.

Sources: Dosovitskiy et al. 2020, "An image is worth 16x16 words" (arXiv:2010.11929), for B/16; Touvron et al. 2020,
"Training data-efficient image transformers" (arXiv:2012.12877), for Ti/16 and S/16 and for stochastic depth in both
branches of a block. Parameters, initial distributions and logits are those of timm's `vit_tiny_patch16_224`,
`vit_small_patch16_224` and `vit_base_patch16_224`, but that the bias of the patches begins with zeros.
"""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Decay
from jaxddp.models.ops.drop_path import added, branch_factors
from jaxddp.models.ops.gelu import gelu
from jaxddp.models.published import Naming, depth_of, naming
from jaxddp.registry import MODELS


@dataclass(frozen=True)
class ViTSize:
    """What tells one ViT from another; a head has `width / heads` features, an MLP `4 * width` between its layers."""

    width: int
    heads: int
    blocks: int = 12
    patch: int = 16
    """Side of a patch, in pixels."""


SIZES = {
    "vit_ti16": ViTSize(192, 3),
    "vit_s16": ViTSize(384, 6),
    "vit_b16": ViTSize(768, 12),
}

TIMM = naming(("patch_embed", "patch_embed.proj"), (r"blocks_(\d+)", r"blocks.\1"))
TORCHVISION = naming(
    ("cls_token", "class_token"),
    ("pos_embed", "encoder.pos_embedding"),
    ("patch_embed", "conv_proj"),
    ("^norm", "encoder.ln"),
    ("^head", "heads.head"),
    (r"blocks_(\d+)", r"encoder.layers.encoder_layer_\1"),
    (r"/norm(\d)", r"/ln_\1"),
    ("attn/qkv/kernel", "self_attention.in_proj_weight"),
    ("attn/qkv/bias", "self_attention.in_proj_bias"),
    ("attn/proj", "self_attention.out_proj"),
    ("mlp/fc1", "mlp.0"),
    ("mlp/fc2", "mlp.3"),
)

_normal = nn.initializers.normal
# PyTorch's default of a convolution.
_of_patches = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class Attention(nn.Module):
    """Every token asks all others, in `heads` ways: [B, N, D] -> [B, N, D]. The softmax is in float32 at least."""

    heads: int
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *shape, width = x.shape
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=_normal(0.02))
        qkv = dense(3 * width, name="qkv")(x).reshape(*shape, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i] for i in range(3))
        # `jax.nn.dot_product_attention` takes its softmax in float32 also where all else is in float64.
        wide = jnp.promote_types(self.dtype, jnp.float32)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=wide)
        shares = jax.nn.softmax(scores / query.shape[-1] ** 0.5).astype(self.dtype)
        x = jnp.einsum("bhqk,bkhd->bqhd", shares, value)
        return dense(width, name="proj")(x.reshape(*shape, width))


class Mlp(nn.Module):
    """Two layers with GELU between: [B, N, D] -> [B, N, D]."""

    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=_normal(0.02))
        return dense(width, name="fc2")(gelu(dense(4 * width, name="fc1")(x)))


class ViTBlock(nn.Module):
    """Attention, then an MLP, each of normalized tokens and each added to them."""

    heads: int
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        """`factors`, [B, 2], multiply what is added; see `branch_factors`."""
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        of_attention, of_mlp = (None, None) if factors is None else factors.T
        y = nn.LayerNorm(name="norm1", use_fast_variance=False, **dtypes)(x)
        x = added(x, Attention(self.heads, name="attn", **dtypes)(y), of_attention)
        y = nn.LayerNorm(name="norm2", use_fast_variance=False, **dtypes)(x)
        return added(x, Mlp(name="mlp", **dtypes)(y), of_mlp)


class ViT(nn.Module):
    """A vision transformer that classifies by a class token, with learned positions.

    Attributes:
        drop_path: the probability that an example leaves out a branch of the last block, in training.
        dtype: of the computation. The softmax, the last norm and the head stay in float32 at least.
        param_dtype: of parameters (float64 for proofs, under x64).
    """

    size: ViTSize
    num_classes: int
    drop_path: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def published_names(self) -> tuple[Naming, ...]:
        """See `jaxddp.models.published`."""
        return TIMM, TORCHVISION

    @property
    def depth(self) -> int:
        """Of the layers that `depth_of` tells apart: the embedding, each block, the head with the norm before it."""
        return self.size.blocks + 2

    def depth_of(self, path: str) -> int:
        """See `jaxddp.models.published`."""
        return depth_of(path, [(f"blocks_{i}",) for i in range(self.size.blocks)], ("norm", "head"))

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Normalized images [B, H, W, C], in whole patches -> logits [B, num_classes], in float32 at least.

        The table of positions fits images of as many patches as those of the initialization. `example_keys`, random
        keys [B], are needed in training with `drop_path`. Raises: InputError.
        """
        blocks, factors = self.size.blocks, None
        if train and self.drop_path:
            factors = branch_factors(self.drop_path, blocks, 2, example_keys)
        x = self.embedded(images.astype(self.dtype))
        for i in range(blocks):
            block = ViTBlock(self.size.heads, self.dtype, self.param_dtype, name=f"blocks_{i}")
            x = block(x, None if factors is None else factors[:, i])
        wide: dict[str, Any] = {"dtype": jnp.promote_types(self.dtype, jnp.float32), "param_dtype": self.param_dtype}
        x = nn.LayerNorm(name="norm", use_fast_variance=False, **wide)(x[:, 0])
        return nn.Dense(self.num_classes, kernel_init=_normal(0.02), name="head", **wide)(x)

    def embedded(self, images: jax.Array) -> jax.Array:
        """The class token and one token of each patch, with their positions: [B, 1 + H / patch * W / patch, D]."""
        width, patch = self.size.width, self.size.patch
        check_whole(images.shape[1:3], patch)
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        conv = nn.Conv(
            width,
            (patch, patch),
            patch,
            "VALID",
            kernel_init=_of_patches,
            conv_general_dilated=_patch_by_patch,
            name="patch_embed",
            **dtypes,
        )
        x = conv(images)
        # Not len(images): programs are exported for any number of images.
        batch, rows, columns, _ = x.shape
        x = x.reshape(batch, rows * columns, width)
        self.check_positions(images.shape[1:3], x.shape[1])
        token = self.param("cls_token", _normal(1e-6), (1, 1, width), self.param_dtype)
        positions = self.param("pos_embed", _normal(0.02), (1, 1 + x.shape[1], width), self.param_dtype)
        x = jnp.concatenate([jnp.broadcast_to(token.astype(x.dtype), (batch, 1, width)), x], axis=1)
        return x + positions.astype(x.dtype)

    def check_positions(self, size: tuple[int, ...], patches: int) -> None:
        """Raises `InputError` where the table of positions is for another number of patches."""
        table = self.get_variable("params", "pos_embed")
        if table is None or table.shape[1] == 1 + patches:
            return
        height, width = size
        side = round((table.shape[1] - 1) ** 0.5) * self.size.patch
        raise InputError(
            f"vit: images of {height}x{width} pixels have {patches} patches, and the table of positions is for "
            f"{table.shape[1] - 1}",
            advice=("give ", Key.plain("data.image_size", side)),
        )


def _patch_by_patch(images: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """The convolution whose stride is its kernel's side, as a product of matrices: on a CPU XLA's takes much longer."""
    batch, height, width, channels = images.shape
    side = kernel.shape[0]
    patches = images.reshape(batch, height // side, side, width // side, side, channels)
    return jnp.einsum("bhiwjc,ijcd->bhwd", patches, kernel)


def check_whole(size: tuple[int, ...], patch: int) -> None:
    """Raises `InputError` where images cannot be cut into whole patches."""
    height, width = size
    if height % patch or width % patch:
        below = min(size) // patch * patch
        near = " or ".join(str(side) for side in (below, below + patch) if side)
        raise InputError(
            f"vit: images of {height}x{width} pixels are not whole patches of {patch}",
            advice=("give ", Key.plain("data.image_size", near)),
        )


@dataclass(frozen=True)
class ViTSettings:
    """Of `model`."""

    drop_path: Decay = 0.0


def _of(name: str, config: Config, num_classes: int) -> ViT:
    own, precision = settings_of(config.model, ViTSettings), config.train.precision or jnp.float32
    return ViT(SIZES[name], num_classes, own.drop_path, precision)


for name in SIZES:
    MODELS.add(name, ViTSettings)(functools.partial(_of, name))
