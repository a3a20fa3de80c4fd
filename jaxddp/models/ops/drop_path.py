"""Stochastic depth: in training an example leaves out whole residual branches, deep ones more often than early ones.

Huang et al. 2016 (arXiv:1603.09382), with probabilities that grow linearly from 0 in the first block; as in timm and
torchvision, the branches that stay are scaled up in training, and evaluation has all of them as they are.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.core.errors import InputError


def branch_factors(rate: float, blocks: int, branches: int, example_keys: jax.Array | None) -> jax.Array:
    """What multiplies each branch of each block: float32[B, blocks, branches], of mean 1.

    It is 0 where the example leaves the branch out. What an example draws follows from its key alone.

    Args:
        rate: the probability in the last block, below 1.
        example_keys: random keys [B]. Raises `InputError` where there are none.
    """
    if example_keys is None:
        raise InputError("drop_path: every image needs a random key of its own in training; pass example_keys")
    left_out = np.linspace(0, rate, blocks, dtype=np.float32)[:, None]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (blocks, branches), jnp.float32))(example_keys)
    return (uniform >= left_out) / (1 - left_out)


def added(x: jax.Array, branch: jax.Array, factors: jax.Array | None) -> jax.Array:
    """x + branch, both [B, ...]; the branch multiplied by its example's factor, [B], where there are any."""
    if factors is None:
        return x + branch
    return x + branch * factors.astype(branch.dtype).reshape(-1, *[1] * (branch.ndim - 1))
