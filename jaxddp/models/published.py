"""What a network's arrays are called where its weights were published, and how deep in it they lie.

A network whose weights others publish has these methods (`jaxddp.models.resnet.ResNet` for one); a path is that of an
array within its variables, "params/layer1_0/conv1/kernel" or "batch_stats/bn1/mean":

- `published_names() -> tuple[Naming, ...]`, the first of which is the one that we write;
- `depth_of(path) -> int`, 0 for the stem and `depth - 1` for the head, with `depth` the number of such layers.

Each of our arrays is one published array. A kernel of 4 dimensions is HWIO here and OIHW there, a kernel of 2 is
transposed, and any other array has the same values in the same order.
"""

import re
from collections.abc import Callable, Collection, Sequence

Naming = Callable[[str], str]
"""The path of an array, with its collection -> its published name, "layer1.0.conv1.weight"."""

_ARRAYS = ((r"/(kernel|scale)$", "/weight"), (r"/(mean|var)$", r"/running_\1"))


def naming(*rules: tuple[str, str]) -> Naming:
    """PyTorch's names: dots between modules, `weight` for kernels and scales.

    Each rule is a regular expression and what replaces every match of it in the path, "layer1_0/conv1/kernel"; they are
    applied in this order.
    """

    def name(path: str) -> str:
        _, _, found = path.partition("/")
        for pattern, replacement in (*rules, *_ARRAYS):
            found = re.sub(pattern, replacement, found)
        return found.replace("/", ".")

    return name


def depth_of(path: str, blocks: Sequence[Collection[str]], head: Collection[str]) -> int:
    """How deep an array lies: 0 in the stem, i + 1 in block i, and after the last block the head.

    This is how BEiT (Bao et al. 2021, arXiv:2106.08254) numbers the layers of a ViT, for rates that decay by layer.

    Args:
        blocks: the outermost modules of each block.
        head: the outermost modules behind the last block.
    """
    module = path.split("/")[1]
    if module in head:
        return len(blocks) + 1
    return next((number for number, modules in enumerate(blocks, start=1) if module in modules), 0)
