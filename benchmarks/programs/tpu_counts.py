"""Counts the fusions, bytes, padding and collectives of a compiled TPU program.

The program is XLA's scheduled `HloModuleProto`, which TensorFlow's package can parse. On a TPU an array is stored in
tiles, (8, 128) elements of its two minor dimensions, so sizes are padded to multiples of these. The array lies in HBM
or in the small vector memory (VMEM). Copies between these run beside the fusions.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.harness import Figures
from benchmarks.programs.hlo_module import COLLECTIVES, CONTROL, FREE, HloModule
from benchmarks.programs.shapes import leaves, num_bytes, size

HBM = 0
"""The number of the memory space in a layout. Others are on the chip."""
HBM_BYTES = {
    **{"TPU v2": 8e9, "TPU v3": 16e9},
    **{"TPU v4": 32e9, "TPU v5 lite": 16e9, "TPU v5": 95e9, "TPU v6 lite": 32e9},
}
"""The memory of a device, by JAX's name of the device kind. Chips before v4 have two devices. Source: Google Cloud's
pages of the TPU versions."""
LARGEST = 20
_MOVES = {"copy", "transpose", "reshape", "bitcast", "convert", "parameter", "tuple", "pad", "slice"}


@dataclass(frozen=True)
class Operation:
    """One scheduled operation.

    Attributes:
        kind: "convolution" (with its fused operations), "fusion", "data movement", "prefetch" (a copy between HBM and
            VMEM that runs beside other operations), "collective" or "other".
        cycles: The compiler's estimate; 0 without one.
        hbm_bytes: Bytes of the operands and results that lie in HBM, padding included.
        flops: Multiplications and additions of its convolutions and matrix products.
        padded_flops: The same with all dimensions padded to the tiles of the operands.
        payload: Bytes that a collective sends and combines, without padding; 0 for others.
    """

    name: str
    kind: str
    operation: str
    cycles: int
    hbm_bytes: int
    flops: int = 0
    padded_flops: int = 0
    payload: int = 0


def count_program(program: bytes, images: int, *, steps_in_a_loop: bool = False) -> Figures:
    """Return the counts of one chip, whose slice of the batch has `images` images.

    Args:
        program: A serialized `HloModuleProto`.
        steps_in_a_loop: Whether the program's loop takes the steps. Then only the loop's body counts.
    """
    operations = list(_Reader(HloModule(program)).operations(steps_in_a_loop))
    kinds = Counter(operation.kind for operation in operations)
    flops = sum(operation.flops for operation in operations)
    padded = sum(operation.padded_flops for operation in operations)
    cycles = sum(operation.cycles for operation in operations)
    largest = sorted(operations, key=lambda operation: -operation.cycles)[:LARGEST]
    return {
        "fusions": kinds["fusion"] + kinds["convolution"],
        "convolutions": kinds["convolution"],
        "data_movements": kinds["data movement"],
        "prefetches": kinds["prefetch"],
        "hbm_bytes_per_image": sum(operation.hbm_bytes for operation in operations) / images,
        "flops_per_image": flops / images,
        "padding": 1 - flops / padded if padded else 0.0,
        "estimated_cycles": cycles,
        "estimated_cycles_of_movements": sum(o.cycles for o in operations if o.kind == "data movement"),
        "collectives": _collectives(operations, max(1, cycles)),
        "largest": [vars(operation) | {"share": operation.cycles / max(1, cycles)} for operation in largest],
    }


def _collectives(operations: list[Operation], total: int) -> list[Figures]:
    """Return the collectives, each with the fraction of all estimated cycles before it, and until the wait for it."""
    starts = {o.name: place for place, o in enumerate(operations) if o.kind == "collective"}
    results = []
    for name, place in starts.items():
        before = sum(operation.cycles for operation in operations[:place])
        end = next((i for i, o in enumerate(operations) if o.kind == "done" and o.operation == name), place)
        beside = sum(operation.cycles for operation in operations[place + 1 : end])
        figures = {"name": name, "bytes": operations[place].payload}
        results.append(figures | {"cycles_before": before / total, "cycles_beside": beside / total})
    return results


class _Reader:
    """A reader of the operations of a program."""

    def __init__(self, module: HloModule):
        self._module, self._instructions = module, module.instructions

    def operations(self, steps_in_a_loop: bool) -> Iterator[Operation]:
        """Yield the operations in the order of the schedule."""
        for instruction in self._module.walk_step(steps_in_a_loop):
            if instruction.opcode not in FREE | CONTROL and not _is_scalar(instruction):
                yield self._operation(instruction)

    def _operation(self, instruction: Any) -> Operation:
        inside = list(self._inside(instruction))
        convolutions = [i for i in inside if i.opcode in ("convolution", "dot")]
        flops, kind = [self._flops(i) for i in convolutions], _kind(instruction, inside)
        sent = (i for i in inside if i.opcode.startswith(COLLECTIVES))
        operands = (self._instructions[number].shape for i in sent for number in i.operand_ids)
        return Operation(
            name=instruction.name,
            kind=kind,
            operation=self._name_of_operation(instruction),
            cycles=_estimated_cycles(instruction),
            hbm_bytes=self._hbm_bytes(instruction),
            flops=sum(useful for useful, _ in flops),
            padded_flops=sum(padded for _, padded in flops),
            payload=sum(map(num_bytes, operands)) if kind == "collective" else 0,
        )

    def _name_of_operation(self, instruction: Any) -> str:
        if instruction.opcode.endswith("-done"):
            return self._instructions[instruction.operand_ids[0]].name
        return instruction.metadata.op_name

    def _inside(self, instruction: Any) -> Iterator[Any]:
        """Yield the instruction, or for a fusion the instructions inside, at any depth."""
        if instruction.opcode != "fusion":
            yield instruction
            return
        for inner in self._module.fused(instruction):
            yield from self._inside(inner)

    def _hbm_bytes(self, instruction: Any) -> int:
        operands = [self._instructions[number].shape for number in instruction.operand_ids]
        if instruction.opcode.endswith("-done"):
            return 0
        if instruction.opcode in ("copy-start", "slice-start"):
            # The tuple holds the source, the destination and a semaphore.
            source, destination = leaves(instruction.shape)[:2]
            moved = destination if num_bytes(destination) <= num_bytes(source) else source
            return padded_bytes(moved) * sum(map(_is_in_hbm, (source, destination)))
        shapes = [leaf for shape in operands for leaf in leaves(shape)]
        if not instruction.opcode.endswith("-start"):
            shapes += leaves(instruction.shape)
        return sum(padded_bytes(shape) for shape in shapes if _is_in_hbm(shape))

    def _flops(self, instruction: Any) -> tuple[int, int]:
        """Return the FLOPs of a convolution or product, without and with the padding of its tiles."""
        left, right = (self._instructions[number].shape for number in instruction.operand_ids[:2])
        result = leaves(instruction.shape)[0]
        if instruction.opcode == "dot":
            contracted = instruction.dot_dimension_numbers.lhs_contracting_dimensions
            return tuple(
                2 * math.prod(dimensions(result)) * math.prod(dimensions(left)[axis] for axis in contracted)
                for dimensions in (lambda shape: list(shape.dimensions), padded_dimensions)
            )  # pyright: ignore[reportReturnType]
        numbers, spatial = instruction.convolution_dimension_numbers, 1
        sizes = (left.dimensions[axis] for axis in numbers.input_spatial_dimensions)
        outputs = (result.dimensions[axis] for axis in numbers.output_spatial_dimensions)
        for axis, size_in, size_out in zip(instruction.window.dimensions, sizes, outputs, strict=True):
            spatial *= _products_along(axis, size_in, size_out)
        contracted, features = numbers.kernel_input_feature_dimension, list(right.dimensions)
        outer = result.dimensions[numbers.output_batch_dimension] * result.dimensions[numbers.output_feature_dimension]
        useful = 2 * spatial * outer * features[contracted]
        tiled = math.prod(padded_dimensions(result)) * padded_dimensions(right)[contracted]
        return useful, useful * tiled // (size(result) * features[contracted])


def _products_along(axis: Any, size_in: int, size_out: int) -> int:
    """Return how many pairs of an output and a tap of the window meet an input, along one axis of a convolution.

    XLA expresses gradients and strides by dilated inputs and by windows that are mostly outside of the images. Products
    with these zeros are not counted.

    Args:
        axis: A `WindowDimension` of the program.
    """
    positions = np.arange(size_out)[:, None] * axis.stride + np.arange(axis.size) * axis.window_dilation
    positions -= axis.padding_low
    inside = (positions >= 0) & (positions <= (size_in - 1) * axis.base_dilation)
    return int(np.sum(inside & (positions % axis.base_dilation == 0)))


def _is_scalar(instruction: Any) -> bool:
    """Return whether an instruction computes single numbers, such as the bits of a random key."""
    shapes = leaves(instruction.shape)
    return instruction.opcode != "fusion" and bool(shapes) and all(size(shape) <= 1 for shape in shapes)


def _kind(instruction: Any, inside: list[Any]) -> str:
    opcode, opcodes = instruction.opcode, {each.opcode for each in inside}
    if any(name.startswith(COLLECTIVES) for name in opcodes):
        return "done" if opcode.endswith("-done") else "collective"
    if opcode in ("copy-start", "slice-start"):
        return "prefetch"
    if opcode.endswith("-done"):
        return "other"
    if opcodes & {"convolution", "dot"}:
        return "convolution"
    if opcodes <= _MOVES:
        return "data movement"
    return "fusion" if opcode == "fusion" else "other"


def _estimated_cycles(instruction: Any) -> int:
    config: Mapping[str, Any] = json.loads(instruction.backend_config or b"{}") if instruction.backend_config else {}
    return int(config.get("window_config", {}).get("estimated_cycles", 0))


def _is_in_hbm(shape: Any) -> bool:
    return shape.layout.memory_space == HBM


def padded_dimensions(shape: Any) -> list[int]:
    """Return the dimensions of an array, padded to its tiles."""
    dimensions, layout = list(shape.dimensions), shape.layout
    if layout.tiles:
        tile = list(layout.tiles[0].dimensions)
        # The last dimension of the tile is that of the minor-most axis.
        for axis, length in zip(layout.minor_to_major, reversed(tile), strict=False):
            dimensions[axis] = -(-dimensions[axis] // length) * length
    return dimensions


def padded_bytes(shape: Any) -> int:
    """Return the bytes that an array takes, padding included."""
    elements = size(shape)
    return num_bytes(shape) * math.prod(padded_dimensions(shape)) // elements if elements else 0
