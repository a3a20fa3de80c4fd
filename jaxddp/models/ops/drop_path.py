"""Stochastic depth: in training each example skips random residual branches.

Source: Huang et al. 2016 (arXiv:1603.09382). The probability of skipping grows linearly with the number of the block,
from 0 in the first block. As in timm and torchvision, training scales up the branches that are not skipped, and
evaluation uses all branches without scaling.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.core.errors import InputError


def branch_factors(rate: float, blocks: int, branches: int, example_keys: jax.Array | None) -> jax.Array:
    """Return a factor for each branch of each block: float32[B, blocks, branches], with mean 1.

    The factor is 0 if the example skips the branch. The factor depends only on the example's key.

    Args:
        rate: the probability of skipping in the last block, below 1.
        example_keys: random keys [B].

    Raises:
        InputError: `example_keys` is None.
    """
    if example_keys is None:
        raise InputError("drop_path: in training every image needs its own random key; pass example_keys")
    skip_rates = np.linspace(0, rate, blocks, dtype=np.float32)[:, None]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (blocks, branches), jnp.float32))(example_keys)
    return (uniform >= skip_rates) / (1 - skip_rates)


def add_branch(x: jax.Array, branch: jax.Array, factors: jax.Array | None) -> jax.Array:
    """Return x + branch, both [B, ...]. If `factors`, [B], is not None, the branch is multiplied by it."""
    if factors is None:
        return x + branch
    return x + branch * factors.astype(branch.dtype).reshape(-1, *[1] * (branch.ndim - 1))
