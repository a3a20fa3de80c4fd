"""Reads the collectives of a compiled program from its text."""

import math
import re
from dataclasses import dataclass

import numpy as np

WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1}
_COLLECTIVE = re.compile(
    r"= (?P<types>.*?) (?P<name>all-(?:reduce|gather|to-all)|reduce-scatter|collective-permute)(-start)?\((?P<rest>.*)"
)


@dataclass(frozen=True)
class Collective:
    """A collective.

    Attributes:
        num_bytes: the bytes of its result on a device.
        devices: the numbers of the devices that take part together, for each set of such devices.
    """

    name: str
    num_bytes: int
    devices: tuple[tuple[int, ...], ...]

    def crosses(self, size: int) -> bool:
        """Return whether it connects devices of different groups of `size` neighbours."""
        return any(len({device // size for device in together}) > 1 for together in self.devices)


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a program in the order of its text."""
    return [
        Collective(match["name"], _num_bytes(match["types"]), _devices(match["rest"]))
        for match in _COLLECTIVE.finditer(text)
    ]


def _num_bytes(types: str) -> int:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    return sum(WIDTHS[kind] * math.prod(int(size) for size in shape.split(",") if size) for kind, shape in arrays)


def _devices(rest: str) -> tuple[tuple[int, ...], ...]:
    """Read the devices in one of XLA's three notations: sets of numbers, a reshaped range, or axes of a mesh."""
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return tuple(tuple(map(int, together.split(","))) for together in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, reshaped = _numbers(match[1]), np.arange(math.prod(_numbers(match[2]))).reshape(_numbers(match[2]))
        return _rows((reshaped.transpose(_numbers(match[3])) if match[3] else reshaped).reshape(shape))
    match = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}", rest
    )
    assert match, f"a collective with an unknown notation of its devices: {rest}"
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    devices = np.arange(math.prod(axes.values()))
    if match[2]:
        devices = devices.reshape(_numbers(match[2])).transpose(_numbers(match[3]))
    together = [list(axes).index(name) for name in re.findall(r"'(\w+)'", match[4])]
    moved = np.moveaxis(devices.reshape(tuple(axes.values())), together, range(-len(together), 0))
    return _rows(moved.reshape(-1, math.prod(list(axes.values())[place] for place in together)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _rows(devices: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in devices)
