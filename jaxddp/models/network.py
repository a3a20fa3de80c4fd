"""What the built-in networks share: the names of arrays in published weights, the depth of layers, operations.

A network with published weights is a `Network`. A user's network may have any of these methods too. The argument `path`
is the path of an array within the variables, such as "params/layer1_0/conv1/kernel" or "batch_stats/bn1/mean".

- `published_names() -> tuple[Naming, ...]`: the namings that are accepted when weights are read. Export uses the first
  naming, or that of a library.
- `depth_of(path) -> int`: the index of an array's layer, 0 for the stem and `depth - 1` for the head. The network's
  property `depth` is the number of layers.
- `published_constants() -> dict[str, np.ndarray]`: arrays that the library of the first naming stores, and that the
  network computes from its architecture, by published name. Export writes them, and reading ignores them.
- `position_grids(height, width) -> dict[str, PositionGrid]`: the grids of its position embeddings [1, tokens, D] for
  images of this size, by path. Weights for another size are interpolated.

Each array of the network corresponds to one published array. Kernels of 4 dimensions are HWIO in Flax and OIHW in
PyTorch. Kernels of 2 dimensions are transposed. All other arrays have the same values in the same order.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.config.layers import ADAPTERS, SIMSIAM, has_prefix
from jaxddp.core.errors import InputError, Key
from jaxddp.models.interface import PARAMS, Model, name_of
from jaxddp.models.ops.batch_norm import BatchNorm
from jaxddp.models.ops.layers import WEIGHT_INITS, Layer, ModuleFactory, Operations

Naming = Callable[[str], str]
"""A function of an array's path, which includes the collection. It returns the published name, such as
"layer1.0.conv1.weight"."""

_ARRAYS = ((r"/(kernel|scale)$", "/weight"), (r"/(mean|var)$", r"/running_\1"))


@dataclass(frozen=True)
class PositionGrid:
    """The grid of position embeddings: `class_tokens` embeddings, and then one for each patch, row by row."""

    rows: int
    columns: int
    class_tokens: int = 1


class LibraryNaming:
    """A naming in PyTorch's style: dots between modules, and `weight` for kernels and scales.

    `rules` are regular expressions and their replacements, applied in order to the path within the collection, such as
    "layer1_0/conv1/kernel". `library` has the name of the library, or several names with blanks between them.
    """

    def __init__(self, library: str, *rules: tuple[str, str]):
        self.library, self.rules = library, rules

    def __call__(self, path: str) -> str:
        _, _, name = path.partition("/")
        for pattern, replacement in (*self.rules, *_ARRAYS):
            name = re.sub(pattern, replacement, name)
        return name.replace("/", ".")


torchvision_naming, timm_naming = (functools.partial(LibraryNaming, library) for library in ("torchvision", "timm"))


class RunNetwork(Layer, kw_only=True):
    """A network whose batch statistics and operations depend on a run.

    Attributes:
        axis_name: the mesh axis over which training averages batch statistics; None for statistics of each device.
        group: the number of consecutive images that training normalizes together; None for all images of a device.
        operations: the implementations of the operations; None for the defaults. See `jaxddp.platforms`.
    """

    axis_name: str | None = None
    group: int | None = None
    operations: Operations | None = None

    def with_operations(self, operations: Operations) -> Self:
        """Return the network with these implementations, or unchanged if it has implementations."""
        return self.clone(operations=operations) if self.operations is None else self


class Network(RunNetwork):
    """A network with published weights.

    The mean over pixels, the last norm and the head are computed in float32 or wider.
    """

    head_modules: ClassVar[tuple[str, ...]] = ("norm", "head")
    """The names of the top-level modules after the last block."""

    def published_names(self) -> tuple[Naming, ...]:
        raise NotImplementedError

    def blocks(self) -> list[tuple[str, ...]]:
        """Return the names of the top-level modules of each block, in order."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """The number of layers for `depth_of`: the stem, each block, and the head."""
        return len(self.blocks()) + 2

    def depth_of(self, path: str) -> int:
        """Return the depth of an array: 0 in the stem, i + 1 in block i, and `depth - 1` in the head.

        This is the numbering of BEiT (Bao et al. 2021, arXiv:2106.08254) for layer-wise learning rate decay.
        """
        module, blocks = path.split("/")[1], self.blocks()
        if module in self.head_modules:
            return len(blocks) + 1
        return next((number for number, modules in enumerate(blocks, start=1) if module in modules), 0)

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean over pixels in float32 or wider: [B, H, W, D] -> [B, D]."""
        return jnp.mean(x, axis=(1, 2), dtype=self.wide["dtype"])

    def layers(
        self,
        train: bool,
        kernel_init: nn.initializers.Initializer = WEIGHT_INITS["he_normal"],
        *,
        same: bool = False,
        **settings: Any,
    ) -> tuple[ModuleFactory, ModuleFactory]:
        """Return the factories of square convolutions and of batch norms.

        They are called as `conv(features, kernel=3, stride=1, name="conv1")(x)` and `norm(name="bn1")(x)`. The padding
        is PyTorch's, which is symmetric for any stride, or with `same` TensorFlow's "SAME". A convolution also takes
        another `padding` and other fields of `nn.Conv`, such as `use_bias=True`. A norm also takes `residual=y`, which
        is added, `relu=True`, which then applies a ReLU, and `pool`, a max pool after it. `settings` are further fields
        of all batch norms.
        """
        operations = self.operations or Operations()

        def conv(features: int, *, kernel: int, stride: int, padding: int | None = None, **options: Any) -> Any:
            if same and stride > 1 and padding is None:
                layer = conv(features, kernel=kernel, stride=stride, padding=0, **options)
                return lambda images: layer(_pad_same(images, kernel, stride))
            padding = kernel // 2 if padding is None else padding
            options = {"use_bias": False, "kernel_init": kernel_init, **self.dtypes, **options}
            options["conv_general_dilated"] = operations.conv_general_dilated(stride, padding)
            return nn.Conv(features, (kernel, kernel), stride, padding, **options)

        settings |= {"axis_name": self.axis_name, "group": self.group, **self.dtypes}
        settings |= {"custom_gradient": operations.custom_norm_gradient, "max_pool": operations.max_pool}
        return conv, functools.partial(BatchNorm, use_running_average=not train, **settings)


def _pad_same(images: jax.Array, kernel: int, stride: int) -> jax.Array:
    """Add the zeros of the padding "SAME", of which the right and the lower side may have one more."""
    margins = jax.lax.padtype_to_pads(images.shape[1:3], (kernel, kernel), (stride, stride), "SAME")
    return jnp.pad(images, ((0, 0), *margins, (0, 0)))


head_init = nn.initializers.normal(0.01)
"""The initializer of the kernels of the heads of ResNets, RegNets and MobileNets."""


def stage_blocks(lengths: Iterable[int], stage: str = "stage", first: int = 1, between: str = "") -> list:
    """Return the modules of each block of stages, such as ("stage1_0",); see `Network.blocks`.

    Args:
        lengths: the number of blocks of each stage.
        stage: the name of a stage without its number, which begins at `first`.
        between: the name, without its number, of a module before the first block of each stage; it belongs to it.
    """
    blocks = [(number, block) for number, length in enumerate(lengths, first) for block in range(length)]
    return [(f"{stage}{i}_{block}", *([f"{between}{i}"] if between and not block else [])) for i, block in blocks]


def check_sides(network: str, images: jax.Array, least: int) -> None:
    """Raise `InputError` if a side of images [B, H, W, C] has less than `least` pixels."""
    height, width = images.shape[1:3]
    if min(height, width) < least:
        problem = f"{network}: images of {height}x{width} pixels are too small"
        raise InputError(problem, advice=("give ", Key("data.image_size", least), " or more"))


def layer_decays(model: Model, names: Sequence[str], decay: float) -> dict[str, float]:
    """Return `decay` raised to the number of layers that follow each parameter; 1 for SimSiam's own layers."""
    module: Any = getattr(model, "module", model)
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    if not hasattr(module, "depth_of"):
        problem = f": {name_of(module)} does not define the depth of its layers"
        advice = "give it depth and depth_of(path), or leave this out and set ", Key("optimizer.rate_factors")
        raise InputError(Key("optimizer.layer_decay", decay), problem, advice=advice)
    own = {name: PARAMS + name.removeprefix(f"{ADAPTERS}/") for name in names if not has_prefix(SIMSIAM, name)}
    return dict.fromkeys(names, 1.0) | {name: decay ** (module.depth - 1 - module.depth_of(own[name])) for name in own}
