"""Vision transformers for image classification, in Flax Linen: ViT-Ti to ViT-H, DINOv2, DINOv3, CLIP and SigLIP.

Sources: Dosovitskiy et al. 2020, "An image is worth 16x16 words" (arXiv:2010.11929), for B, L and H; Touvron et al.
2020, "Training data-efficient image transformers" (arXiv:2012.12877), for Ti and S and for stochastic depth in both
branches of a block; Oquab et al. 2023 (arXiv:2304.07193) and Darcet et al. 2023 (arXiv:2309.16588) for DINOv2 and its
registers; Radford et al. 2021 (arXiv:2103.00020) for CLIP; Zhai et al. 2023 (arXiv:2303.15343) for SigLIP; Siméoni et
al. 2025 (arXiv:2508.10104) for DINOv3. Parameters, initial distributions and logits equal those of timm's networks,
such as `vit_base_patch16_224` for `vit_b16`, except that the bias of the patch embedding starts at zero, and that
DINOv3 and gated MLPs have the initial distributions of the other networks.
"""

from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxddp.models.ops.layers as layers
from jaxddp.core.errors import InputError, Key
from jaxddp.models.network import Naming, Network, PositionGrid, timm_naming, torchvision_naming
from jaxddp.models.ops.layers import Attention, AttentionPool, Layer, Mlp, add_branch


@dataclass(frozen=True)
class ViTSize:
    """A ViT. An attention head has `width / heads` features.

    Attributes:
        patch: the side of a patch in pixels.
        hidden: the number of hidden features of an MLP; None for `4 * width`.
        activation, gate: see `Mlp`.
        epsilon: that of the norms.
        pre_norm: whether a norm precedes the blocks, and the patch embedding has no bias.
        layer_scale: whether a learned factor multiplies each feature of a branch.
        class_token, registers: the tokens before those of the patches.
        positions: what has position embeddings: all tokens, the patches, or queries and keys by rotation.
        pool: what the head reads: the class token, the mean over the patches, or an `AttentionPool`.
    """

    width: int
    heads: int
    blocks: int = 12
    patch: int = 16
    hidden: int | None = None
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "silu"] = "gelu"
    gate: Literal["none", "packed", "split"] = "none"
    epsilon: float = 1e-6
    pre_norm: bool = False
    layer_scale: bool = False
    class_token: bool = True
    registers: int = 0
    positions: Literal["all", "patches", "rotary"] = "all"
    pool: Literal["token", "mean", "attention"] = "token"

    @property
    def mlp(self) -> dict[str, Any]:
        """The fields of an `Mlp`."""
        return {"hidden": self.hidden, "activation": _ACTIVATIONS[self.activation], "gate": self.gate}


_ACTIVATIONS = {"gelu": layers.gelu, "gelu_tanh": nn.gelu, "quick_gelu": layers.quick_gelu, "silu": nn.silu}
_WIDTHS = {"ti": (192, 3), "s": (384, 6), "b": (768, 12), "l": (1024, 16, 24), "h": (1280, 16, 32), "g": (1536, 24, 40)}
_WIDTHS |= {"so400m": (1152, 16, 27)}
"""The width, the heads and the blocks (12 if not given) of each size."""
_CLIP: dict[str, Any] = {"epsilon": 1e-5, "pre_norm": True}
_DINOV2: dict[str, Any] = {"layer_scale": True}
_REGISTERS: dict[str, Any] = {"layer_scale": True, "registers": 4, "positions": "patches"}
_DINOV3: dict[str, Any] = {"layer_scale": True, "registers": 4, "positions": "rotary", "pool": "mean", "epsilon": 1e-5}
_GATED: dict[str, Any] = {"activation": "silu", "gate": "packed", "hidden": 4096}
_PLUS: dict[str, Any] = {"activation": "silu", "gate": "split"}
_SIGLIP: dict[str, Any] = {"class_token": False, "pool": "attention"}


def _of(variant: str, settings: dict[str, Any], **patches: tuple[int, ...]) -> dict[str, ViTSize]:
    """Return ViTs by name, for each size with the sides of its patches."""
    pairs = [(size, patch) for size, sides in patches.items() for patch in sides]
    return {f"vit_{size}{patch}{variant}": ViTSize(*_WIDTHS[size], patch=patch, **settings) for size, patch in pairs}


SIZES = {
    **_of("", {}, ti=(16,), s=(8, 16, 32), b=(8, 16, 32), l=(16, 32), h=(14,)),
    **_of("_dinov2", _DINOV2, s=(14,), b=(14,), l=(14,)),
    **_of("_dinov2", _DINOV2 | _GATED, g=(14,)),
    **_of("_reg4_dinov2", _REGISTERS, s=(14,), b=(14,), l=(14,)),
    **_of("_reg4_dinov2", _REGISTERS | _GATED, g=(14,)),
    **_of("_clip", _CLIP, b=(32, 16), l=(14,), h=(14,)),
    **_of("_clip_quickgelu", _CLIP | {"activation": "quick_gelu"}, b=(32, 16), l=(14,), h=(14,)),
    **_of("_siglip", _SIGLIP, b=(16,), l=(16,)),
    **_of("_siglip", _SIGLIP | {"activation": "gelu_tanh"}, b=(32,)),
    **_of("_siglip", _SIGLIP | {"hidden": 4304}, so400m=(14,)),
    **_of("_siglip", _SIGLIP | {"hidden": 4304, "activation": "gelu_tanh"}, so400m=(16,)),
    **_of("_dinov3", _DINOV3, s=(16,), b=(16,), l=(16,)),
    "vit_s16plus_dinov3": ViTSize(*_WIDTHS["s"], **_DINOV3, **_PLUS),
    "vit_h16plus_dinov3": ViTSize(1280, 20, 32, **_DINOV3, **_PLUS),
}

_TIMM = ("patch_embed", "patch_embed.proj"), (r"blocks_(\d+)", r"blocks.\1"), ("latent_token", "latent")
TIMM = timm_naming(*_TIMM, (r"gamma_(\d)", r"ls\1.gamma"))
TIMM_DINOV3 = timm_naming(*_TIMM)
TORCHVISION = torchvision_naming(
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


class ViTBlock(Layer):
    """A transformer block: attention, then an MLP, each with a norm before it and a residual connection."""

    size: ViTSize

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None, angles: np.ndarray | None = None) -> jax.Array:
        """Apply the block. The columns of `factors`, [B, 2], multiply its two branches; see `branch_factors`."""
        size, factors_of = self.size, (None, None) if factors is None else factors.T
        y = nn.LayerNorm(size.epsilon, name="norm1", use_fast_variance=False, **self.dtypes)(x)
        y = Attention(size.heads, use_bias=angles is None, name="attn", **self.dtypes)(y, angles=angles)
        x = add_branch(x, self.scaled(y, "gamma_1"), factors_of[0])
        y = nn.LayerNorm(size.epsilon, name="norm2", use_fast_variance=False, **self.dtypes)(x)
        return add_branch(x, self.scaled(Mlp(**size.mlp, name="mlp", **self.dtypes)(y), "gamma_2"), factors_of[1])

    def scaled(self, branch: jax.Array, name: str) -> jax.Array:
        """Multiply a branch by its layer scale, if there is one."""
        if not self.size.layer_scale:
            return branch
        scale = self.param(name, nn.initializers.constant(1e-5), branch.shape[-1:], self.param_dtype)
        return branch * scale.astype(branch.dtype)


class ViT(Network):
    """A vision transformer.

    Attributes:
        drop_path: the probability that an example skips a branch of the last block in training.
    """

    head_modules = ("norm", "attn_pool", "head")
    size: ViTSize
    num_classes: int
    drop_path: float = 0.0

    def published_names(self) -> tuple[Naming, ...]:
        """Return the namings of timm and torchvision; see `jaxddp.models.network`."""
        return (TIMM_DINOV3,) if self.size.positions == "rotary" else (TIMM, TORCHVISION)

    def position_grids(self, height: int, width: int) -> dict[str, PositionGrid]:
        """Return the grid of the position embeddings for images of this size; see `jaxddp.models.network`."""
        if self.size.positions == "rotary":
            return {}
        patch, tokens = self.size.patch, self.embedded_tokens
        return {"params/pos_embed": PositionGrid(height // patch, width // patch, tokens)}

    @property
    def embedded_tokens(self) -> int:
        """The number of tokens before those of the patches that have position embeddings."""
        return int(self.size.class_token and self.size.positions == "all")

    def blocks(self) -> list[tuple[str, ...]]:
        return [(f"blocks_{i}",) for i in range(self.size.blocks)]

    @property
    def heat_map_layer(self) -> str:
        """The layer of heat maps, the last one whose patches the head reads; see `jaxddp.models.activations`."""
        return f"blocks_{self.size.blocks - 1}/norm1" if self.size.pool == "token" else "norm"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes] in float32 or wider.

        Height and width must be multiples of the patch side. With position embeddings, images must have as many patches
        as the example of `init`, because they are not interpolated here.

        Args:
            example_keys: random keys [B], required in training with `drop_path`.

        Raises: InputError if the images have a wrong size, or the keys are missing.
        """
        size = self.size
        factors = layers.branch_factors(self.drop_path if train else 0, size.blocks, 2, example_keys)
        x, angles = self.embed(images.astype(self.dtype)), None
        if size.pre_norm:
            x = nn.LayerNorm(size.epsilon, name="norm_pre", use_fast_variance=False, **self.dtypes)(x)
        if size.positions == "rotary":
            rows, columns = (side // size.patch for side in images.shape[1:3])
            angles = layers.rotary_angles(rows, columns, size.width // size.heads)
        for i, block_factors in enumerate(factors):
            x = ViTBlock(size, name=f"blocks_{i}", **self.dtypes)(x, block_factors, angles)
        x = x[:, 0] if size.pool == "token" else x
        x = nn.LayerNorm(size.epsilon, name="norm", use_fast_variance=False, **self.wide)(x)
        if size.pool == "attention":
            x = AttentionPool(size.heads, size.epsilon, size.mlp, name="attn_pool", **self.wide)(x)
        elif size.pool == "mean":
            x = x[:, size.class_token + size.registers :].mean(1)
        return self.dense(self.num_classes, "head", **self.wide)(x)

    def embed(self, images: jax.Array) -> jax.Array:
        """Return the class token, the registers and the patch tokens, with position embeddings: [B, tokens, D]."""
        size = self.size
        check_patches(images.shape[1:3], size.patch)
        x = layers.patch_embedding(size.width, size.patch, use_bias=not size.pre_norm, **self.dtypes)(images)
        # Do not use len(images): programs are exported for any number of images.
        batch, rows, columns, _ = x.shape
        x = x.reshape(batch, rows * columns, size.width)
        self.check_positions(images.shape[1:3], x.shape[1])
        counts = (("cls_token", int(size.class_token)), ("reg_token", size.registers))
        shapes = {name: (1, count, size.width) for name, count in counts if count}
        tokens = [self.param(name, _normal(1e-6), shape, self.param_dtype) for name, shape in shapes.items()]
        tokens = [jnp.broadcast_to(token.astype(x.dtype), (batch, *token.shape[1:])) for token in tokens]
        embedded = tokens[: self.embedded_tokens]
        x = jnp.concatenate([*embedded, x], axis=1)
        if size.positions != "rotary":
            x += self.param("pos_embed", _normal(0.02), (1, *x.shape[1:]), self.param_dtype).astype(x.dtype)
        return x if embedded else jnp.concatenate([*tokens, x], axis=1)

    def check_positions(self, size: tuple[int, ...], patches: int) -> None:
        """Raise `InputError` if the position embeddings are for a different number of patches."""
        table = self.get_variable("params", "pos_embed")
        if table is None or (stored := table.shape[1] - self.embedded_tokens) == patches:
            return
        height, width = size
        side = round(stored**0.5) * self.size.patch
        found = f"vit: images of {height}x{width} pixels have {patches} patches"
        problem = f"{found}, but the position embeddings are for {stored}"
        raise InputError(problem, advice=("give ", Key.plain("data.image_size", side)))


def check_patches(size: tuple[int, ...], patch: int) -> None:
    """Raise `InputError` if images cannot be divided into whole patches."""
    height, width = size
    if height % patch or width % patch:
        below = min(size) // patch * patch
        sides = " or ".join(str(side) for side in (below, below + patch) if side)
        problem = f"vit: images of {height}x{width} pixels are not whole patches of {patch}"
        raise InputError(problem, advice=("give ", Key.plain("data.image_size", sides)))
