"""Parse `parallel.shares`, the relative sizes of the devices' slices of a batch, and divide a batch by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.config.values import converted
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.ranges import Range

AUTO = "auto"
_SHARES = Range(0, 1_000_000_000, above=True)
_SHOWN = 8


@dataclass(frozen=True)
class Shares:
    """The relative sizes of the slices of a batch, one for each device or each process; empty for "auto"."""

    weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Shares":
        """Parse "auto", or numbers above 0 such as "3,1".

        Raises:
            InputError: the text has another form.
        """
        if text == AUTO:
            return cls()
        weights = [converted(word, float) for word in text.split(",")]
        if any(isinstance(weight, str) for weight in weights):
            expected = f": expected {AUTO!r}, or a number for each device or process, as in '3,1'"
            raise InputError(Key("parallel.shares", text), expected)
        if wrong := [weight for weight in weights if weight not in _SHARES]:
            problem = f": {wrong[0]:g} is not {_SHARES}; leave a device out that computes nothing"
            raise InputError(Key("parallel.shares", text), problem)
        return cls(tuple(weights))

    def of_devices(self, devices: int, processes: int) -> tuple[float, ...]:
        """Return the relative size of each device's slice, in mesh order. They are equal for "auto".

        If there is a number for each process, it is divided evenly among the devices of the process.

        Raises:
            InputError: there are as many numbers neither as devices nor as processes.
        """
        weights = self.weights or (1.0,) * devices
        if len(weights) == processes:
            return tuple(weight for weight in weights for _ in range(devices // processes))
        if len(weights) != devices:
            given = f"{counted(len(weights), 'number')} given for {counted(devices, 'device')}"
            advice = f"give {devices}" if processes in (1, devices) else f"give {devices}, or {processes}"
            problem = f": {given} of {counted(processes, 'process')}; {advice}"
            raise InputError(Key("parallel.shares", self.text), problem)
        return weights

    def lengths(self, batch_size: int, devices: int, processes: int, unit: int = 1) -> tuple[int, ...]:
        """Return the number of examples of each device's slice of a global batch, in mesh order.

        Args:
            unit: the sizes are multiples of this number: of the number of microbatches, and of the number of examples
                that must be in one microbatch.

        Raises:
            InputError: the batch cannot be divided into such slices, or a slice would be empty.
        """
        weights = self.of_devices(devices, processes)
        if batch_size % unit or batch_size < unit * devices:
            below = batch_size // unit * unit
            fitting = sorted({max(size, unit * devices) for size in (below, below + unit)})
            problem = f" cannot be divided into {counted(devices, 'slice')} of multiples of {unit} with "
            keys = Key("train.batch_size", batch_size), problem, Key("parallel.shares", self.text)
            raise InputError(*keys, advice=f"{' or '.join(map(str, fitting))} would do")
        smallest = batch_size * min(weights) / sum(weights)
        if self.weights and smallest < unit / 2:
            problem = f": the smallest share is {smallest:.2g} of the {batch_size} examples of a batch"
            advice = f"give less unequal numbers, or raise the batch size; a slice has at least {unit}"
            raise InputError(Key("parallel.shares", self.text), problem, advice=advice)
        return tuple(unit * size for size in divide(batch_size // unit, weights))

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        return ",".join(f"{weight:g}" for weight in self.weights) or AUTO


def divide(total: int, weights: Sequence[float]) -> list[int]:
    """Divide a total into whole numbers of at least 1, in proportion to weights above 0.

    Each number is its quota rounded down, or one more for the largest remainders (the largest remainder method). Of
    equal remainders the earlier comes first. `total` is at least the number of weights.
    """
    # Fractions give the same numbers on every machine.
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    quotas = [total * weight / whole for weight in exact]
    parts = [max(1, int(quota)) for quota in quotas]
    missing = total - sum(parts)
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] - quotas[index])
    for index in by_remainder[: max(missing, 0)]:
        parts[index] += 1
    # Parts that were raised to 1 take from the others.
    for _ in range(-missing):
        index = max((index for index, part in enumerate(parts) if part > 1), key=lambda at: parts[at] - quotas[at])
        parts[index] -= 1
    return parts


def listed(values: Sequence[object]) -> str:
    """Return the values as text, such as "192 and 64"; at most eight of them."""
    *first, last = map(str, values)
    if len(values) > _SHOWN:
        first, last = first[:_SHOWN], f"{len(values) - _SHOWN} more"
    return f"{', '.join(first)} and {last}" if first else last
