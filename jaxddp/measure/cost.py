"""What a compiled program costs: its floating-point operations, and the memory that a device needs for it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jaxddp.core.private_names as private_names
from jaxddp.measure.data_sheets import peak
from jaxddp.measure.flops import count_flops, reads_jaxprs

_BYTES = [f"{part}_size_in_bytes" for part in ("argument", "output", "alias", "temp")]


@dataclass(frozen=True)
class Cost:
    """Of one run of a program."""

    flops_of: Mapping[str, int]
    """Floating-point operations by dtype, over all devices of all processes; see `count_flops`."""
    memory: Any
    """Bytes on each device, XLA's `CompiledMemoryStats`; None where the backend does not say."""

    @property
    def flops(self) -> int:
        """Floating-point operations over all devices."""
        return sum(self.flops_of.values())

    @property
    def needed_bytes(self) -> int | None:
        """Of each device's memory; what of the output takes the place of arguments (a donated state) counts once."""
        if (found := self.memory) is None:
            return None
        output = found.output_size_in_bytes - found.alias_size_in_bytes
        return found.argument_size_in_bytes + output + found.temp_size_in_bytes

    def of_one(self, steps: int) -> "Cost":
        """Of one of the steps that the program takes; all of them share its memory."""
        return replace(self, flops_of={dtype: flops // steps for dtype, flops in self.flops_of.items()})

    def utilization(self, seconds: float, num_devices: int, device_kind: str) -> float | None:
        """Model FLOP utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the share of a time in which
        devices at their peak would have done the same; None where a peak is not known, or nothing was counted.
        """
        at_peak = 0.0
        for dtype, flops in self.flops_of.items():
            best = peak(device_kind, dtype)
            if best is None:
                return None
            at_peak += flops / best
        return at_peak / (num_devices * seconds) if at_peak else None


class Work:
    """What the steps cost that were taken, where they need not all cost the same."""

    def __init__(self) -> None:
        self._steps, self._flops_of, self._memory = 0, Counter[str](), None

    def add(self, steps: int, cost: Cost | None) -> None:
        """Steps that cost so much each; nothing is added where that is unknown."""
        if cost is not None:
            self._steps, self._memory = self._steps + steps, cost.memory
            self._flops_of.update({dtype: steps * flops for dtype, flops in cost.flops_of.items()})

    def mean(self) -> Cost | None:
        """The cost of one, with the memory of the last; None where no step's is known."""
        return Cost(self._flops_of, self._memory).of_one(self._steps) if self._steps else None


def compile_with_cost(function: Any, *arguments: Any) -> tuple[Any, Cost]:
    """Compile a jitted function for arguments, or for their shapes; the executable does what the function does."""
    traced = function.trace(*arguments)
    compiled = traced.lower().compile()
    flops = dict(count_flops(traced.jaxpr)) if reads_jaxprs() else {}
    return compiled, Cost(flops, _memory_of(compiled))


def _memory_of(compiled: Any) -> Any:
    """XLA's `CompiledMemoryStats`; None where there are none, or of a form that is not known."""
    found = compiled.memory_analysis()
    if found is None or all(hasattr(found, name) for name in _BYTES):
        return found
    lost = "what memory a step needs is not known, and not compared with what there is"
    private_names.say_lost("jax", "Compiled.memory_analysis()", lost)
    return None
