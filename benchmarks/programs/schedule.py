"""Reads the kernels of a compiled GPU program in the order of its schedule, with the bytes that each moves.

The program is XLA's `HloModuleProto`, which TensorFlow's package can parse. A kernel is what an instruction of the
schedule launches: a fusion, a library call, a copy or a collective. Its bytes are those of its operands and its result,
without any cache. Of an operand that a fusion only slices or gathers, the elements taken count.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.programs.hlo_module import COLLECTIVES, CONTROL, FREE, HloModule
from benchmarks.programs.shapes import dtype_of, leaves, num_bytes, size

KERNEL_GRADIENT, COLLECTIVE = "kernel gradient", "collective"
_CONVOLUTIONS = {
    "__cudnn$convForward": "convolution",
    "__cudnn$convBiasActivationForward": "convolution",
    "__cudnn$convBackwardInput": "image gradient",
    "__cudnn$convBackwardFilter": KERNEL_GRADIENT,
}
# Part of the operation name of the backward pass.
_BACKWARD = "transpose(jvp"
# Instructions that only move values within a fusion. The others determine the kind of its kernel.
_PLAIN = FREE | {"reshape", "broadcast", "iota"}
_PARTIAL = {"slice", "dynamic-slice", "gather"}


@dataclass(frozen=True)
class Kernel:
    """One launched kernel.

    Attributes:
        kind: One of "convolution", "image gradient", "kernel gradient", "matrix product", "reduction", "elementwise",
            "transpose", "convert", "copy", "collective", "other".
        operation: JAX's name of the operation, or of one of several.
        source: The source line of the operation.
        flops: FLOPs of convolutions and matrix products; 0 for others.
        collective: The operation of a collective, such as "all-reduce"; "" for other kernels.
        message: Bytes of the whole arrays that the devices reduce or gather; 0 for other kernels.
        done: For a collective, the number of kernels launched before the wait for it.
    """

    name: str
    kind: str
    operation: str
    source: str
    num_bytes: int
    flops: int
    dtype: str
    collective: str = ""
    message: int = 0
    done: int | None = None


@dataclass(frozen=True)
class Schedule:
    """The kernels of a program in order, with one iteration of each loop.

    Attributes:
        conditionals: Number of conditionals in the whole program.
        trip_counts: Number of iterations of each loop, or None if the compiler does not know it.
    """

    kernels: tuple[Kernel, ...]
    conditionals: int
    trip_counts: tuple[int | None, ...]


def read_schedule(program: bytes, *, steps_in_a_loop: bool = False) -> Schedule:
    """Read the schedule of a serialized `HloModuleProto`. With steps in a loop, only the loop's body counts."""
    return _Reader(HloModule(program)).schedule(steps_in_a_loop)


class _Reader:
    """A reader of the kernels of a program."""

    def __init__(self, module: HloModule):
        self._module, self._instructions = module, module.instructions
        self._sources = _Sources(module.proto.stack_frame_index)

    def schedule(self, steps_in_a_loop: bool) -> Schedule:
        walked = list(self._module.walk())
        return Schedule(
            tuple(self._kernels(self._module.walk_step(steps_in_a_loop))),
            sum(instruction.opcode == "conditional" for instruction in walked),
            tuple(_trip_count(instruction) for instruction in walked if instruction.opcode == "while"),
        )

    def _kernels(self, instructions: Iterable[Any]) -> list[Kernel]:
        kernels: list[Kernel] = []
        started: dict[int, int] = {}
        for instruction in instructions:
            if instruction.opcode.endswith("-done"):
                place = started[instruction.operand_ids[0]]
                kernels[place] = replace(kernels[place], done=len(kernels))
            elif instruction.opcode not in FREE | CONTROL:
                started[instruction.id] = len(kernels)
                kernels.append(self._kernel(instruction))
        return kernels

    def _kernel(self, instruction: Any) -> Kernel:
        operands = [self._instructions[number] for number in instruction.operand_ids]
        fused = self._fused(instruction)
        collective = self._collective(instruction)
        return Kernel(
            name=instruction.name,
            kind=self._kind(instruction, fused),
            operation=instruction.metadata.op_name,
            source=self._sources.line(instruction.metadata.stack_frame_id),
            num_bytes=self._bytes_read(instruction, fused) + self._bytes_written(instruction, fused),
            flops=self._flops(instruction, operands, fused),
            dtype=dtype_of(operands[0] if operands else instruction),
            collective=collective,
            message=self._message(instruction, operands, collective),
        )

    def _collective(self, instruction: Any) -> str:
        """Return the operation of a collective, or ""."""
        opcode = self._module.opcode(instruction)
        return opcode.removesuffix("-start") if opcode.startswith(COLLECTIVES) else ""

    def _message(self, instruction: Any, operands: list[Any], collective: str) -> int:
        """Return the bytes of a collective's whole arrays: the result of an all-gather, the operands of others."""
        given = sum(num_bytes(operand.shape) for operand in operands) if collective else 0
        if collective != "all-gather":
            return given
        # The shape of a start includes the operands.
        return num_bytes(instruction.shape) - (given if instruction.opcode.endswith("-start") else 0)

    def _fused(self, instruction: Any) -> list[Any]:
        """Return the instructions inside a fusion, its root last; [] for other instructions."""
        if instruction.opcode != "fusion":
            return []
        return self._module.fused(instruction)

    def _bytes_read(self, instruction: Any, fused: list[Any]) -> int:
        operands = [self._instructions[number] for number in instruction.operand_ids]
        if not fused:
            return sum(num_bytes(operand.shape) for operand in operands)
        needed = self._elements_needed(fused)
        parameters = ((i, needed[i.id]) for i in fused if i.opcode == "parameter")
        sizes = ((operands[parameter.parameter_number].shape, count) for parameter, count in parameters)
        return sum(num_bytes(shape) * count // max(1, size(shape)) for shape, count in sizes)

    def _elements_needed(self, fused: list[Any]) -> dict[int, int]:
        """Return by id the number of elements of each value that a fusion needs for its root."""
        needed = {each.id: 0 for each in fused} | {fused[-1].id: size(fused[-1].shape)}
        # Operands come before their users.
        for user in reversed(fused):
            for place, number in enumerate(user.operand_ids):
                value = self._instructions[number]
                taken = _taken(user, place, value, needed[user.id])
                needed[number] = min(size(value.shape), needed[number] + taken)
        return needed

    def _bytes_written(self, instruction: Any, fused: list[Any]) -> int:
        if instruction.opcode.endswith("-start"):
            # Its shape includes the operands.
            return sum(num_bytes(self._instructions[number].shape) for number in instruction.operand_ids)
        updates = [i for i in fused if i.opcode == "dynamic-update-slice"]
        in_place = sum(num_bytes(i.shape) - num_bytes(self._instructions[i.operand_ids[1]].shape) for i in updates)
        return num_bytes(instruction.shape) - in_place

    def _kind(self, instruction: Any, fused: list[Any]) -> str:
        opcode, target = instruction.opcode, instruction.custom_call_target
        if self._collective(instruction):
            return COLLECTIVE
        if opcode == "custom-call":
            kind = _CONVOLUTIONS.get(target, "matrix product" if _multiplies(target) else "other")
            # Many image gradients are forward convolutions with a flipped kernel.
            backward = kind == "convolution" and _BACKWARD in instruction.metadata.op_name
            return "image gradient" if backward else kind
        inside = {i.opcode for i in fused} - _PLAIN if fused else {opcode}
        if inside & {"dot", "scaled-dot"}:
            return "matrix product"
        if inside & {"convolution"}:
            return "convolution"
        if inside & {"reduce", "reduce-window", "select-and-scatter", "scatter"}:
            return "reduction"
        if inside == {"convert"}:
            return "convert"
        if inside <= {"copy"}:
            return "copy"
        if inside <= {"copy", "convert", "transpose"}:
            return "transpose"
        return "elementwise" if fused else "other"

    def _flops(self, instruction: Any, operands: list[Any], fused: list[Any]) -> int:
        if instruction.custom_call_target in _CONVOLUTIONS:
            return _convolution_flops(instruction, operands)
        # The multiplications of a custom kernel cannot be derived from its operands.
        if instruction.opcode == "custom-call" and _multiplies(instruction.custom_call_target):
            return _product_flops(operands[0], operands[1], leaves(instruction.shape)[0], _batch_axes(instruction))
        dots = ([self._instructions[n] for n in i.operand_ids[:2]] + [i] for i in fused if i.opcode == "dot")
        return sum(
            _product_flops(a, b, dot.shape, dot.dot_dimension_numbers.lhs_batch_dimensions) for a, b, dot in dots
        )


class _Sources:
    """Source lines of instructions: the innermost line of this project, or else of any library."""

    def __init__(self, index: Any):
        self._index = index

    def line(self, frame: int) -> str:
        lines = list(self._lines(frame))
        project_lines = (line for line in lines if line.startswith(("jaxddp/", "configs/")))
        return next(project_lines, lines[0] if lines else "")

    def _lines(self, frame: int) -> Iterator[str]:
        """Yield the lines from the innermost frame outwards. Frame numbers begin at 1."""
        while frame:
            found = self._index.stack_frames[frame - 1]
            location = self._index.file_locations[found.file_location_id - 1]
            yield f"{_short(self._index.file_names[location.file_name_id - 1])}:{location.line}"
            frame = found.parent_frame_id


def _short(path: str) -> str:
    """Return a path relative to the parent of its package."""
    for folder in ("/site-packages/", "/jaxddp/", "/configs/"):
        _, found, after = path.rpartition(folder)
        if found:
            return after if folder == "/site-packages/" else f"{folder[1:]}{after}"
    return path.rpartition("/")[2]


def _taken(user: Any, place: int, value: Any, needed: int) -> int:
    """Return the number of elements of an operand that an instruction needs for `needed` elements of its result."""
    if user.opcode == "dynamic-update-slice" and place == 0:
        return 0  # updated in place
    partial = user.opcode in _PARTIAL and place == 0
    as_many = user.opcode in ("bitcast", "reshape") or list(user.shape.dimensions) == list(value.shape.dimensions)
    if partial or (as_many and user.opcode != "tuple"):
        return needed
    return size(value.shape) if needed else 0


def _trip_count(instruction: Any) -> int | None:
    config = json.loads(instruction.backend_config or "{}")
    found = config.get("known_trip_count", {}).get("n")
    return None if found is None else int(found)


def _convolution_flops(instruction: Any, operands: list[Any]) -> int:
    """Return two FLOPs per multiplication, padding included; both gradients of a convolution have the same number."""
    result, sides = leaves(instruction.shape)[0], [operand.shape for operand in operands[:2]]
    target = _CONVOLUTIONS[instruction.custom_call_target]
    output, kernel = {
        "convolution": (result, sides[1]),
        "image gradient": (sides[0], sides[1]),
        KERNEL_GRADIENT: (sides[1], result),
    }[target]
    features = kernel.dimensions[instruction.convolution_dimension_numbers.kernel_output_feature_dimension]
    return 2 * size(output) * size(kernel) // features


def _multiplies(target: str) -> bool:
    return "gemm" in target or "matmul" in target


def _product_flops(a: Any, b: Any, result: Any, batch_axes: Sequence[int]) -> int:
    """Return the FLOPs of B products of [M, K] by [K, N], from the product of the three sizes, B (B M K N) squared.

    Args:
        batch_axes: the axes of the first operand whose sizes have the product B.
    """
    batch = math.prod(a.shape.dimensions[axis] for axis in batch_axes)
    return 2 * math.isqrt(size(a.shape) * size(b.shape) * size(result) // batch)


def _batch_axes(instruction: Any) -> list[int]:
    """Return the batch axes of the first operand of a custom call of cuBLAS."""
    config = json.loads(instruction.backend_config or "{}").get("gemm_backend_config", {})
    return [int(axis) for axis in config.get("dot_dimension_numbers", {}).get("lhs_batch_dimensions", [])]
