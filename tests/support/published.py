"""Weights by a formula of their names, and the results of torchvision and timm with them (`published.json`
and `published_positions.json`).

CI has neither library. `torch_logits.py` writes the files on a machine that has both. Any machine creates the same
weights."""

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

CLASSES = 10
GOLDEN = Path(__file__).parent / "published.json"
POSITIONS = Path(__file__).parent / "published_positions.json"
_BITS = 53


@cache
def golden() -> dict[str, dict]:
    """By network: `source`, the number of `arrays`, a `digest` of their names and shapes, and `logits` by size
    ("224x224")."""
    return json.loads(GOLDEN.read_text())


@cache
def golden_positions() -> dict[str, list]:
    """By grids ("4x4 to 6x7"): the position embeddings that timm interpolates from `positions` of the first grid."""
    return json.loads(POSITIONS.read_text())


def positions(grid: str) -> np.ndarray:
    """Return position embeddings of a class token and a grid of patches, float64[1, tokens, 2] in [-1, 1)."""
    rows, columns = map(int, grid.split("x"))
    return 2 * _uniform(f"positions {grid}", (1, 1 + rows * columns, 2)) - 1


def digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Hash names and shapes, in any order, without batch counters."""
    lines = [f"{name} {tuple(shape)}" for name, shape in sorted(shapes.items()) if not name.endswith("batches_tracked")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return float64 arrays, none all zero or one, with logits of moderate size."""
    return {name: _values(name, tuple(shape)) for name, shape in shapes.items()}


def image(height: int, width: int) -> np.ndarray:
    """Return one normalized image, float64[1, height, width, 3] in [-2, 2)."""
    return 4 * _uniform("image", (1, height, width, 3)) - 2


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    uniform = _uniform(name, shape)
    centered = 2 * uniform - 1
    if name.endswith("running_var"):
        return 0.5 + uniform
    if name.endswith(("layer_scale", "gamma")):
        return 0.2 * centered
    if name.endswith("weight") and len(shape) == 1:
        return 0.5 + 0.5 * uniform
    if len(shape) == 1 or shape[0] == 1:
        return 0.1 * centered
    return centered * math.sqrt(3 / math.prod(shape[1:]))


def _uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    # Use raw words: NumPy guarantees them for every release, but guarantees no distribution.
    words = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((words >> np.uint64(64 - _BITS)) * 2.0**-_BITS).reshape(shape)
