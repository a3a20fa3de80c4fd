"""Which parameters weight decay applies to."""

from typing import Any

import jax


def decayed(params: Any) -> Any:
    """A tree of bool: true for kernels, not for vectors, biases and scales (He et al. 2018, arXiv:1812.01187, 3.1)."""
    return jax.tree.map(lambda p: p.ndim > 1, params)
