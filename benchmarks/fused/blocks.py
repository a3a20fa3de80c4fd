"""Loads and stores blocks of arrays in Pallas kernels. Blocks that extend past the end of an array are masked."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MIN_LENGTH = 16
"""Minimum length of the blocks that Triton multiplies."""


@dataclass(frozen=True)
class Block:
    """`length` elements of an axis. If not `exact`, the last block extends past the axis's `size`."""

    start: jax.Array
    length: int
    size: int
    exact: bool

    @classmethod
    def of(cls, number: jax.Array, size: int, longest: int) -> "Block":
        length = block_length(size, longest)
        return cls(number * length, length, size, size % length == 0)


def block_length(size: int, longest: int) -> int:
    """Return the block length for an axis, a power of two, as Triton requires."""
    return min(longest, max(MIN_LENGTH, pl.next_power_of_2(size)))


def zero_outside(values: jax.Array, *blocks: Block) -> jax.Array:
    """Set the values of a block outside the array to zero."""
    mask = _mask(*blocks)
    return values if mask is None else jnp.where(mask, values, 0)


def load(ref: Any, *blocks: Block) -> jax.Array:
    """Load a block of an array, with zeros outside the array."""
    mask = _mask(*blocks)
    return plgpu.load(ref.at[_indices(blocks)], mask=mask, other=None if mask is None else 0)


def store(ref: Any, values: jax.Array, *position: Any) -> None:
    """Store values at `position`, which has a `Block` or a number for each axis of the array."""
    mask = _mask(*(each for each in position if isinstance(each, Block)))
    plgpu.store(ref.at[_indices(position)], values, mask=mask)


def _indices(position: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(pl.ds(each.start, each.length) if isinstance(each, Block) else each for each in position)


def _mask(*blocks: Block) -> jax.Array | None:
    """Return a mask of the elements inside the array, or None if all are inside."""
    shape = tuple(block.length for block in blocks)
    limits = [
        block.start + lax.broadcasted_iota(jnp.int32, shape, axis) < block.size
        for axis, block in enumerate(blocks)
        if not block.exact
    ]
    return functools.reduce(jnp.logical_and, limits) if limits else None
