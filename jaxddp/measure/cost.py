"""The cost of a compiled program: its floating-point operations and the memory that it needs on a device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jaxddp.core.libraries as libraries
from jaxddp.measure.data_sheets import peak
from jaxddp.measure.flops import can_read_jaxprs, count_flops

_BYTES = [f"{part}_size_in_bytes" for part in ("argument", "output", "alias", "temp")]


@dataclass(frozen=True)
class Cost:
    """The cost of one execution of a program."""

    flops_of: Mapping[str, int]
    """Floating-point operations by dtype, summed over all devices of all processes; see `count_flops`."""
    memory: Any
    """XLA's `CompiledMemoryStats`, in bytes on each device; None if the backend does not report them."""

    @property
    def flops(self) -> int:
        """Return the number of floating-point operations of all devices."""
        return sum(self.flops_of.values())

    @property
    def needed_bytes(self) -> int | None:
        """Return the bytes needed on each device. Memory that an output shares with an argument counts once."""
        if (stats := self.memory) is None:
            return None
        output = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return stats.argument_size_in_bytes + output + stats.temp_size_in_bytes

    def per_step(self, steps: int) -> "Cost":
        """Return the cost of one step of a program with `steps` steps. All steps use the same memory."""
        return replace(self, flops_of={dtype: flops // steps for dtype, flops in self.flops_of.items()})

    def utilization(self, seconds: float, num_devices: int, device_kind: str) -> float | None:
        """Return the model FLOP utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

        This is the time that the devices would need at their peak rate, divided by `seconds`. The result is None if a
        peak rate is unknown or no operations were counted.
        """
        seconds_at_peak = 0.0
        for dtype, flops in self.flops_of.items():
            peak_rate = peak(device_kind, dtype)
            if peak_rate is None:
                return None
            seconds_at_peak += flops / peak_rate
        return seconds_at_peak / (num_devices * seconds) if seconds_at_peak else None


class MeanCost:
    """The mean cost of the steps of a run, whose costs may differ."""

    def __init__(self) -> None:
        self._steps, self._flops_of, self._memory = 0, Counter[str](), None

    def add(self, steps: int, cost: Cost | None) -> None:
        """Add `steps` steps, each with this cost. An unknown cost (None) is ignored."""
        if cost is not None:
            self._steps, self._memory = self._steps + steps, cost.memory
            self._flops_of.update({dtype: steps * flops for dtype, flops in cost.flops_of.items()})

    def mean(self) -> Cost | None:
        """Return the mean cost of a step, with the memory of the last step; None without known costs."""
        return Cost(self._flops_of, self._memory).per_step(self._steps) if self._steps else None


def compile_with_cost(function: Any, *arguments: Any) -> tuple[Any, Cost]:
    """Compile a jitted function for arguments, or for their shapes; return the executable and its cost."""
    traced = function.trace(*arguments)
    compiled = traced.lower().compile()
    flops = dict(count_flops(traced.jaxpr)) if can_read_jaxprs() else {}
    return compiled, Cost(flops, _memory_of(compiled))


def _memory_of(compiled: Any) -> Any:
    """Return XLA's `CompiledMemoryStats`; None if there are none, or if expected fields are missing."""
    stats = compiled.memory_analysis()
    if stats is None or all(hasattr(stats, name) for name in _BYTES):
        return stats
    lost = "the memory that a step needs is unknown, and not compared with the available memory"
    libraries.warn_missing("jax", "Compiled.memory_analysis()", lost)
    return None
