"""Weights computed from their names, and the logits of torchvision and timm with these weights (`published.json`).

CI has neither library. `torch_logits.py` writes the file where they are installed; the weights are equal everywhere.
"""

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
_BITS = 53


@cache
def golden() -> dict[str, dict]:
    """Returns by network: `source`, number of `arrays`, `digest` of names and shapes, `logits` by size ("224x224")."""
    return json.loads(GOLDEN.read_text())


def digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns a digest of names and shapes in any order, without counters of batches."""
    lines = [f"{name} {tuple(shape)}" for name, shape in sorted(shapes.items()) if not name.endswith("batches_tracked")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns float64 arrays, none constantly zero or one, that give logits of moderate size."""
    return {name: _values(name, tuple(shape)) for name, shape in shapes.items()}


def image(height: int, width: int) -> np.ndarray:
    """Returns a normalized image, float64[1, height, width, 3] in [-2, 2)."""
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
    # Raw words are stable across NumPy releases; distributions are not.
    words = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((words >> np.uint64(64 - _BITS)) * 2.0**-_BITS).reshape(shape)
