"""Which parameters weight decay applies to."""

from typing import Any

import jax


def decayed(params: Any) -> Any:
    """A tree of bool: true for kernels, false for biases and for the scales of normalizations, which are the vectors
    (He et al. 2018, arXiv:1812.01187, section 3.1)."""
    return jax.tree.map(lambda p: p.ndim > 1, params)
