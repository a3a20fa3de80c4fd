"""The names of a network's arrays in published weights, and the depth of each array in the network.

A network with published weights, such as `jaxddp.models.resnet.ResNet`, has two methods. The argument `path` is the
path of an array within the variables, such as "params/layer1_0/conv1/kernel" or "batch_stats/bn1/mean".

- `published_names() -> tuple[Naming, ...]`: the namings that are accepted when weights are read. Export uses the first
  naming.
- `depth_of(path) -> int`: the index of an array's layer, 0 for the stem and `depth - 1` for the head. The network's
  property `depth` is the number of layers.

A network may have two more methods:

- `published_constants() -> dict[str, np.ndarray]`: arrays that the library of the first naming stores, and that the
  network computes from its sizes, by published name. Export writes them, and reading ignores them.
- `position_grids(height, width) -> dict[str, PositionGrid]`: the grids of its position embeddings [1, tokens, D] for
  images of this size, by path. Weights for another size are interpolated.

Each array of the network corresponds to one published array. Kernels of 4 dimensions are HWIO in Flax and OIHW in
PyTorch. Kernels of 2 dimensions are transposed. All other arrays have the same values in the same order.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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


def naming(*rules: tuple[str, str]) -> Naming:
    """Return a naming in PyTorch's style: dots between modules, and `weight` for kernels and scales.

    Args:
        rules: regular expressions and their replacements, applied in order to the path within the collection, such as
            "layer1_0/conv1/kernel".
    """

    def published_name(path: str) -> str:
        _, _, name = path.partition("/")
        for pattern, replacement in (*rules, *_ARRAYS):
            name = re.sub(pattern, replacement, name)
        return name.replace("/", ".")

    return published_name


def depth_of(path: str, blocks: Sequence[Collection[str]], head: Collection[str]) -> int:
    """Return the depth of an array: 0 in the stem, i + 1 in block i, and `len(blocks) + 1` in the head.

    This is the numbering of BEiT (Bao et al. 2021, arXiv:2106.08254) for layer-wise learning rate decay.

    Args:
        blocks: the names of the top-level modules of each block.
        head: the names of the top-level modules after the last block.
    """
    module = path.split("/")[1]
    if module in head:
        return len(blocks) + 1
    return next((number for number, modules in enumerate(blocks, start=1) if module in modules), 0)
