"""Swin-T and Swin-S for image classification, in Flax Linen.

Source: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows" (arXiv:2103.14030).
Parameters, initial distributions and logits equal those of torchvision's `swin_t` and `swin_s`, except that the bias of
the patch embedding starts at zero. timm's versions give the same logits for images of 224 pixels.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.models.network import Naming, Network, check_sides, stage_blocks, timm_naming, torchvision_naming
from jaxddp.models.ops.layers import Attention, Layer, Mlp, add_branch, branch_factors, dense_init, patch_embedding

_MASKED = -100.0
"""The number that torchvision and timm add to the score of a pair of tokens that must not attend to each other."""


def partition(x: Any, side: int) -> Any:
    """Divide [B, H, W, D] into windows of side x side tokens: [B, H * W / side**2, side**2, D].

    H and W must be multiples of the side.
    """
    batch, height, width, features = x.shape
    rows, columns = height // side, width // side
    x = x.reshape(batch, rows, side, columns, side, features).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, side * side, features)


def merge(windows: jax.Array, size: tuple[int, int], side: int) -> jax.Array:
    """Compose [B, H, W, D], of the size (H, W), from its windows; the inverse of `partition`."""
    batch, _, _, features = windows.shape
    rows, columns = (length // side for length in size)
    x = windows.reshape(batch, rows, columns, side, side, features).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, *size, features)


def relative_positions(side: int) -> np.ndarray:
    """Return the row of each pair of tokens in a table of relative positions: int64[side**2, side**2].

    The table has (2 * side - 1)**2 rows, one for each difference of two positions in a window, and is ordered by the
    difference of the rows and then by that of the columns. The first axis is that of the queries.
    """
    at = np.stack(np.unravel_index(np.arange(side * side), (side, side)))
    down, right = at[:, :, None] - at[:, None, :] + side - 1
    return down * (2 * side - 1) + right


@functools.cache
def shift_mask(size: tuple[int, int], side: int, shift: tuple[int, int]) -> np.ndarray:
    """Return the bias for windows of a cyclically shifted image: float32[windows, side**2, side**2].

    The windows at the lower and right edge have tokens from both edges of the image, which are not neighbours. The bias
    is 0 for tokens of the same part of the image, and -100 otherwise.

    Args:
        size: the height and width of the image in tokens.
        shift: the number of rows and of columns by which the image is shifted; 0 for an axis without a shift.
    """
    parts = [_parts(length, side, by) for length, by in zip(size, shift, strict=True)]
    image = 3 * parts[0][:, None] + parts[1]
    windows = partition(image[None, ..., None], side)[0, ..., 0]
    return np.where(windows[:, :, None] == windows[:, None, :], 0, _MASKED).astype(np.float32)


def _parts(length: int, side: int, shift: int) -> np.ndarray:
    """Return the part of the image to which each position along a shifted axis belongs: 0, 1 or 2."""
    at = np.arange(length)
    return (at >= length - side).astype(int) + (at >= length - shift) if shift else np.zeros(length, int)


def pad_to_multiples(x: jax.Array, side: int) -> jax.Array:
    """Pad [B, H, W, D] with zeros at the lower and right edge, to multiples of the side."""
    below, right = (-length % side for length in x.shape[1:3])
    return jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0))) if below or right else x


STAGE_SIZES = {"swin_t": (2, 2, 6, 2), "swin_s": (2, 2, 18, 2)}
"""The number of blocks in each of the four stages."""

_PATCH, _WINDOW, _HEAD_FEATURES = 4, 7, 32
_STAGES = range(4)
_TABLE = "relative_position_bias_table"
_INDEX = "relative_position_index"

TORCHVISION = torchvision_naming(
    ("patch_embed", "features.0.0"),
    ("patch_norm", "features.0.2"),
    *((f"stage{i}_(\\d+)", rf"features.{2 * i + 1}.\1") for i in _STAGES),
    *((f"merge{i}/", f"features.{2 * i}/") for i in _STAGES[1:]),
    (_TABLE, f"attn/{_TABLE}"),
    ("mlp/fc1", "mlp.0"),
    ("mlp/fc2", "mlp.3"),
)
TIMM = timm_naming(
    ("patch_embed", "patch_embed.proj"),
    ("patch_norm", "patch_embed.norm"),
    (r"stage(\d)_(\d+)", r"layers.\1.blocks.\2"),
    (r"merge(\d)/", r"layers.\1.downsample/"),
    (_TABLE, f"attn/{_TABLE}"),
    ("^head/", "head.fc/"),
)

_norm = functools.partial(nn.LayerNorm, epsilon=1e-5, use_fast_variance=False)


class SwinBlock(Layer):
    """Attention within windows, then an MLP, each with a norm before it and a residual connection.

    Attributes:
        is_shifted: whether the windows are shifted by half their side, so that they overlap those of other blocks.
    """

    heads: int
    is_shifted: bool

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Apply the block to [B, H, W, D]. The columns of `factors`, [B, 2], multiply its two branches."""
        attention_factors, mlp_factors = (None, None) if factors is None else factors.T
        x = add_branch(x, self.attend(_norm(name="norm1", **self.dtypes)(x)), attention_factors)
        return add_branch(x, Mlp(name="mlp", **self.dtypes)(_norm(name="norm2", **self.dtypes)(x)), mlp_factors)

    def attend(self, x: jax.Array) -> jax.Array:
        """Apply attention within windows: [B, H, W, D] -> [B, H, W, D].

        As in torchvision, zeros pad the image to whole windows, and all tokens attend to this padding too. An axis that
        is covered by one window is not shifted.
        """
        _, height, width, _ = x.shape
        x = pad_to_multiples(x, _WINDOW)
        size = (x.shape[1], x.shape[2])
        down, right = (_WINDOW // 2 if self.is_shifted and length > _WINDOW else 0 for length in size)
        bias = self.position_bias()
        if down or right:
            x = jnp.roll(x, (-down, -right), (1, 2))
            bias = bias + shift_mask(size, _WINDOW, (down, right))[:, None]
        attention = Attention(self.heads, name="attn", **self.dtypes)
        x = merge(attention(partition(x, _WINDOW), bias), size, _WINDOW)
        if down or right:
            x = jnp.roll(x, (down, right), (1, 2))
        return x[:, :height, :width]

    def position_bias(self) -> jax.Array:
        """Return the bias of each pair of tokens in a window, in float32 or wider: [heads, tokens, tokens]."""
        table = self.param(_TABLE, dense_init, ((2 * _WINDOW - 1) ** 2, self.heads), self.param_dtype)
        return table[relative_positions(_WINDOW)].transpose(2, 0, 1).astype(self.wide["dtype"])


class PatchMerging(Layer):
    """Map each square of 2 x 2 tokens to one token: [B, H, W, D] -> [B, H / 2, W / 2, 2 D], rounded up."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = 2 * x.shape[-1]
        x = pad_to_multiples(x, 2)
        # The order of the four tokens is that of published weights: the two of the left column come first.
        x = jnp.concatenate([x[:, row::2, column::2] for column in range(2) for row in range(2)], axis=-1)
        return self.dense(features, "reduction", use_bias=False)(_norm(name="norm", **self.dtypes)(x))


class Swin(Network):
    """A Swin Transformer: four stages of blocks. Each stage after the first has half the height and width of the
    previous one, and twice its features.

    Attributes:
        stage_sizes: the number of blocks in each stage.
        width: the number of features of the first stage. An attention head has 32 features, or all features of a
            stage that has fewer.
        drop_path: the probability that an example skips a branch of the last block in training.
    """

    stage_sizes: tuple[int, ...]
    num_classes: int
    width: int = 96
    drop_path: float = 0.0

    def published_names(self) -> tuple[Naming, ...]:
        """Return the namings of torchvision and timm; see `jaxddp.models.network`."""
        return TORCHVISION, TIMM

    def published_constants(self) -> dict[str, np.ndarray]:
        """Return the constants that torchvision stores; see `jaxddp.models.network`."""
        blocks = [(stage, block) for stage, size in enumerate(self.stage_sizes) for block in range(size)]
        index = relative_positions(_WINDOW).reshape(-1)
        return {f"features.{2 * stage + 1}.{block}.attn.{_INDEX}": index for stage, block in blocks}

    def blocks(self) -> list[tuple[str, ...]]:
        return stage_blocks(self.stage_sizes, first=0, between="merge")

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C], H and W at least 4, to logits [B, num_classes] in float32 or wider.

        Rows and columns after the last whole patch of 4 pixels are not used.

        Args:
            example_keys: random keys [B], required in training with `drop_path`.

        Raises: InputError if the images are too small, or the keys are missing.
        """
        factors = iter(branch_factors(self.drop_path if train else 0, sum(self.stage_sizes), 2, example_keys))
        x = self.embed(images.astype(self.dtype))
        for stage, size in enumerate(self.stage_sizes):
            if stage:
                x = PatchMerging(name=f"merge{stage}", **self.dtypes)(x)
            heads = max(1, x.shape[-1] // _HEAD_FEATURES)
            for block in range(size):
                x = SwinBlock(heads, block % 2 == 1, name=f"stage{stage}_{block}", **self.dtypes)(x, next(factors))
        x = jnp.mean(_norm(name="norm", **self.wide)(x), axis=(1, 2))
        return self.dense(self.num_classes, "head", **self.wide)(x)

    def embed(self, images: jax.Array) -> jax.Array:
        """Return the tokens of all whole patches, with a norm: [B, H / 4, W / 4, width], rounded down."""
        height, width = images.shape[1:3]
        check_sides("swin", images, _PATCH)
        images = images[:, : height // _PATCH * _PATCH, : width // _PATCH * _PATCH]
        x = patch_embedding(self.width, _PATCH, **self.dtypes)(images)
        return _norm(name="patch_norm", **self.dtypes)(x)
