"""Loads and stores blocks of arrays in Pallas kernels. Blocks that extend past the end of an array are masked."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST = 16
"""The smallest blocks that Triton multiplies."""


@dataclass(frozen=True)
class Block:
    """`length` elements of an axis. Unless `exact`, the last block may extend past the axis's `size`."""

    start: jax.Array
    length: int
    size: int
    exact: bool

    @classmethod
    def of(cls, number: jax.Array, size: int, longest: int) -> "Block":
        length = block_length(size, longest)
        return cls(number * length, length, size, size % length == 0)


def block_length(size: int, longest: int) -> int:
    """Returns the block length for an axis, a power of two, as Triton requires."""
    return min(longest, max(LEAST, pl.next_power_of_2(size)))


def inside(values: jax.Array, *blocks: Block) -> jax.Array:
    """Sets the values of a block outside the array to zero."""
    mask = _mask(*blocks)
    return values if mask is None else jnp.where(mask, values, 0)


def load(ref: Any, *blocks: Block) -> jax.Array:
    """Loads a block of an array, with zeros outside the array."""
    mask = _mask(*blocks)
    return plgpu.load(ref.at[_places(blocks)], mask=mask, other=None if mask is None else 0)


def store(ref: Any, values: jax.Array, *where: Any) -> None:
    """Stores values at `where`, which has a `Block` or a number for each axis of the array."""
    mask = _mask(*(each for each in where if isinstance(each, Block)))
    plgpu.store(ref.at[_places(where)], values, mask=mask)


def _places(where: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(pl.ds(each.start, each.length) if isinstance(each, Block) else each for each in where)


def _mask(*blocks: Block) -> jax.Array | None:
    """Returns a mask of the elements inside the array, or None if all are inside."""
    shape = tuple(block.length for block in blocks)
    limits = [
        block.start + lax.broadcasted_iota(jnp.int32, shape, axis) < block.size
        for axis, block in enumerate(blocks)
        if not block.exact
    ]
    return functools.reduce(jnp.logical_and, limits) if limits else None
