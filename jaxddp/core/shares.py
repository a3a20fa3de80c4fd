"""The shares of the devices in each batch, and the sizes of the slices that follow from them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.ranges import Range, real_number

AUTO = "auto"
_SHARES = Range(0, 1_000_000_000, above=True)


@dataclass(frozen=True)
class Shares:
    """The relative sizes of the slices of a batch, one for each device or each process; empty for "auto"."""

    weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Shares":
        """Parse "auto", or numbers above 0 such as "3,1". Raises: InputError if the text has another form."""
        if text == AUTO:
            return cls()
        with suppress(ValueError):
            weights = tuple(map(real_number, text.split(",")))
            if all(weight in _SHARES for weight in weights):
                return cls(weights)
        expected = f": expected {AUTO!r}, or a number for each device or process, as in '3,1', each {_SHARES}"
        raise InputError(Key("parallel.shares", text), expected)

    def of_devices(self, devices: int, processes: int) -> tuple[float, ...]:
        """Return the relative size of each device's slice, in mesh order. They are equal for "auto".

        The number of a process is divided evenly among its devices. Raises: InputError if there are as many numbers
        neither as devices nor as processes.
        """
        weights = self.weights or (1.0,) * devices
        if len(weights) == processes:
            return tuple(weight for weight in weights for _ in range(devices // processes))
        if len(weights) != devices:
            problem = f": {counted(len(weights), 'number')} given for {counted(devices, 'device')} of "
            advice = f"give {devices}" if processes in (1, devices) else f"give {devices}, or {processes}"
            raise InputError(Key("parallel.shares", self.text), problem, counted(processes, "process"), advice=advice)
        return weights

    def lengths(self, batch_size: int, devices: int, processes: int, unit: int = 1) -> tuple[int, ...]:
        """Return the number of examples of each device's slice of a global batch, in mesh order: multiples of `unit`.

        Raises: InputError if there are no such slices, or a slice would be empty.
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
    """Divide a total into whole numbers of at least 1, in proportion to weights above 0 (largest remainder method).

    Of equal remainders the earlier comes first. `total` is at least the number of weights.
    """
    # Fractions give the same numbers on every machine.
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    parts = [max(1, int(quota)) for quota in quotas]
    while missing := total - sum(parts):
        sign = 1 if missing > 0 else -1
        # Parts that were raised to 1 take from the others.
        able = [index for index, part in enumerate(parts) if part > 1 or sign > 0]
        parts[max(able, key=lambda index: sign * (quotas[index] - parts[index]))] += sign
    return parts
