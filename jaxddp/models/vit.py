"""Vision transformers for image classification: ViT-Ti to ViT-H with patches of 8 to 32 pixels, in Flax Linen.

Sources: Dosovitskiy et al. 2020, "An image is worth 16x16 words" (arXiv:2010.11929), for B, L and H; Touvron et al.
2020, "Training data-efficient image transformers" (arXiv:2012.12877), for Ti and S and for stochastic depth in both
branches of a block. Parameters, initial distributions and logits equal those of timm's networks, such as
`vit_base_patch16_224` for `vit_b16`, except that the bias of the patch embedding starts at zero.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, Key
from jaxddp.models.network import Naming, Network, PositionGrid, naming
from jaxddp.models.ops.layers import Attention, Layer, Mlp, add_branch, branch_factors, patch_embedding


@dataclass(frozen=True)
class ViTSize:
    """A ViT. An attention head has `width / heads` features, and an MLP has `4 * width` hidden features."""

    width: int
    heads: int
    blocks: int = 12
    patch: int = 16
    """The side of a patch in pixels."""


_TI, _S, _B, _L, _H = (192, 3), (384, 6), (768, 12), (1024, 16, 24), (1280, 16, 32)
"""The width, the heads and the blocks (12 if not given) of each size."""

SIZES = {
    "vit_ti16": ViTSize(*_TI),
    **{f"vit_s{patch}": ViTSize(*_S, patch=patch) for patch in (8, 16, 32)},
    **{f"vit_b{patch}": ViTSize(*_B, patch=patch) for patch in (8, 16, 32)},
    **{f"vit_l{patch}": ViTSize(*_L, patch=patch) for patch in (16, 32)},
    "vit_h14": ViTSize(*_H, patch=14),
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


class ViTBlock(Layer):
    """A transformer block: attention, then an MLP, each with a norm before it and a residual connection."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Apply the block. The columns of `factors`, [B, 2], multiply its two branches; see `branch_factors`."""
        attention_factors, mlp_factors = (None, None) if factors is None else factors.T
        y = nn.LayerNorm(name="norm1", use_fast_variance=False, **self.dtypes)(x)
        x = add_branch(x, Attention(self.heads, name="attn", **self.dtypes)(y), attention_factors)
        y = nn.LayerNorm(name="norm2", use_fast_variance=False, **self.dtypes)(x)
        return add_branch(x, Mlp(name="mlp", **self.dtypes)(y), mlp_factors)


class ViT(Network):
    """A vision transformer with a class token and learned position embeddings.

    Attributes:
        drop_path: the probability that an example skips a branch of the last block in training.
    """

    size: ViTSize
    num_classes: int
    drop_path: float = 0.0

    def published_names(self) -> tuple[Naming, ...]:
        """Return the namings of timm and torchvision; see `jaxddp.models.network`."""
        return TIMM, TORCHVISION

    def position_grids(self, height: int, width: int) -> dict[str, PositionGrid]:
        """Return the grid of the position embeddings for images of this size; see `jaxddp.models.network`."""
        return {"params/pos_embed": PositionGrid(height // self.size.patch, width // self.size.patch)}

    def blocks(self) -> list[tuple[str, ...]]:
        return [(f"blocks_{i}",) for i in range(self.size.blocks)]

    @property
    def heat_map_layer(self) -> str:
        """The layer of heat maps; see `jaxddp.models.activations`. After it, the class token reads the patches last."""
        return f"blocks_{self.size.blocks - 1}/norm1"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes] in float32 or wider.

        Height and width must be multiples of the patch side. Images must have as many patches as the example of `init`,
        because position embeddings are not interpolated.

        Args:
            example_keys: random keys [B], required in training with `drop_path`.

        Raises:
            InputError: the images have a wrong size, or the keys are missing.
        """
        factors = branch_factors(self.drop_path if train else 0, self.size.blocks, 2, example_keys)
        x = self.embed(images.astype(self.dtype))
        for i, block_factors in enumerate(factors):
            x = ViTBlock(self.size.heads, name=f"blocks_{i}", **self.dtypes)(x, block_factors)
        x = nn.LayerNorm(name="norm", use_fast_variance=False, **self.wide)(x[:, 0])
        return self.dense(self.num_classes, "head", **self.wide)(x)

    def embed(self, images: jax.Array) -> jax.Array:
        """Return the class token and the patch tokens, with position embeddings: [B, 1 + H / patch * W / patch, D]."""
        width, patch = self.size.width, self.size.patch
        check_patches(images.shape[1:3], patch)
        x = patch_embedding(width, patch, **self.dtypes)(images)
        # Do not use len(images): programs are exported for any number of images.
        batch, rows, columns, _ = x.shape
        x = x.reshape(batch, rows * columns, width)
        self.check_positions(images.shape[1:3], x.shape[1])
        token = self.param("cls_token", _normal(1e-6), (1, 1, width), self.param_dtype)
        positions = self.param("pos_embed", _normal(0.02), (1, 1 + x.shape[1], width), self.param_dtype)
        x = jnp.concatenate([jnp.broadcast_to(token.astype(x.dtype), (batch, 1, width)), x], axis=1)
        return x + positions.astype(x.dtype)

    def check_positions(self, size: tuple[int, ...], patches: int) -> None:
        """Raise `InputError` if the position embeddings are for a different number of patches."""
        table = self.get_variable("params", "pos_embed")
        if table is None or table.shape[1] == 1 + patches:
            return
        height, width = size
        side = round((table.shape[1] - 1) ** 0.5) * self.size.patch
        raise InputError(
            f"vit: images of {height}x{width} pixels have {patches} patches, but the position embeddings are for "
            f"{table.shape[1] - 1}",
            advice=("give ", Key.plain("data.image_size", side)),
        )


def check_patches(size: tuple[int, ...], patch: int) -> None:
    """Raise `InputError` if images cannot be divided into whole patches."""
    height, width = size
    if height % patch or width % patch:
        below = min(size) // patch * patch
        sides = " or ".join(str(side) for side in (below, below + patch) if side)
        raise InputError(
            f"vit: images of {height}x{width} pixels are not whole patches of {patch}",
            advice=("give ", Key.plain("data.image_size", sides)),
        )
