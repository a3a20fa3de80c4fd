"""Blocks of the arrays that a Pallas kernel reads and writes; those that reach past the end of an array are masked."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST = 16
"""Triton multiplies no smaller blocks."""


@dataclass(frozen=True)
class Block:
    """`length` places of an axis; where not `exact`, the last of its blocks may reach past its `size`."""

    start: jax.Array
    length: int
    size: int
    exact: bool

    @classmethod
    def of(cls, number: jax.Array, size: int, longest: int) -> "Block":
        length = block_length(size, longest)
        return cls(number * length, length, size, size % length == 0)


def block_length(size: int, longest: int) -> int:
    """Of the blocks of an axis: a power of two, for Triton has no others."""
    return min(longest, max(LEAST, pl.next_power_of_2(size)))


def inside(values: jax.Array, *blocks: Block) -> jax.Array:
    """The values of a block, zero outside of the array."""
    mask = _mask(*blocks)
    return values if mask is None else jnp.where(mask, values, 0)


def load(ref: Any, *blocks: Block) -> jax.Array:
    """A block of an array in memory, zero outside of it."""
    mask = _mask(*blocks)
    return plgpu.load(ref.at[_places(blocks)], mask=mask, other=None if mask is None else 0)


def store(ref: Any, values: jax.Array, *where: Any) -> None:
    """`where` has a `Block` or a number for each axis of the array."""
    mask = _mask(*(each for each in where if isinstance(each, Block)))
    plgpu.store(ref.at[_places(where)], values, mask=mask)


def _places(where: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(pl.ds(each.start, each.length) if isinstance(each, Block) else each for each in where)


def _mask(*blocks: Block) -> jax.Array | None:
    """Which places are in the array; None where all are."""
    shape = tuple(block.length for block in blocks)
    limits = [
        block.start + lax.broadcasted_iota(jnp.int32, shape, axis) < block.size
        for axis, block in enumerate(blocks)
        if not block.exact
    ]
    return functools.reduce(jnp.logical_and, limits) if limits else None
