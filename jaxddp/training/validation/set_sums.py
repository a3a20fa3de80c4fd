"""Collects the contributions of each batch to metrics over a whole set, on the host."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxddp.engine.objective import BatchArrays

_ON_DEVICES = 4
"""The largest number of batches whose examples have not been fetched yet."""


class SetSums:
    """The contributions of the batches so far; `jaxddp.engine.objective.combine_devices` returns them for a batch."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._waiting: deque[dict[str, BatchArrays]] = deque()
        self._fetched: list[dict[str, Any]] = []

    def add(self, contributions: Mapping[str, Any], *, stacked: bool) -> None:
        """Add the contributions of one batch, or of several, `stacked` along a first axis."""
        if not contributions:
            return
        if not stacked:
            contributions = jax.tree.map(lambda values: values[None], contributions)
        sums = {name: each for name, each in contributions.items() if not isinstance(each, BatchArrays)}
        if sums:
            self._sums = _added(self._sums, sums)
        if kept := {name: each for name, each in contributions.items() if isinstance(each, BatchArrays)}:
            self._waiting.append(kept)
            if len(self._waiting) > _ON_DEVICES:
                self._fetch()

    def results(self) -> dict[str, Any]:
        """Return the arguments of each metric's `finish`, by name, as NumPy arrays."""
        while self._waiting:
            self._fetch()
        examples = jax.tree.map(lambda *parts: np.concatenate(parts), *self._fetched) if self._fetched else {}
        return {**jax.device_get(self._sums), **examples}

    def _fetch(self) -> None:
        kept: dict[str, BatchArrays] = jax.device_get(self._waiting.popleft())
        self._fetched.append({name: _examples(each) for name, each in kept.items()})


def _examples(kept: BatchArrays) -> Any:
    """Return arrays [n, …] of the examples without padding, from arrays [batches, B, …]."""
    is_example = kept.mask.reshape(-1) > 0
    return jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:])[is_example], kept.arrays)


@jax.jit
def _added(total: dict[str, Any], contributions: dict[str, Any]) -> dict[str, Any]:
    """Add the contributions batch by batch, so the result has the same bits for any number of batches in a step."""
    for number in range(len(jax.tree.leaves(contributions)[0])):
        each = jax.tree.map(lambda values, number=number: values[number], contributions)
        total = jax.tree.map(jax.numpy.add, total, each) if total else each
    return total
