"""Walks the schedule of a compiled program, XLA's `HloModuleProto`, which TensorFlow's package can parse."""

import importlib
from collections.abc import Iterator
from typing import Any

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The beginnings of the opcodes of collectives."""
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "opt-barrier"}
FREE |= {"after-all", "partition-id", "replica-id"}
"""The opcodes of instructions that launch nothing: names for memory, and values that the host knows."""
CONTROL = {"while", "conditional"}
"""The opcodes of instructions whose callees are walked, too."""


class HloModule:
    """A scheduled program.

    Args:
        program: A serialized `HloModuleProto`.
    """

    def __init__(self, program: bytes):
        messages = importlib.import_module("tensorflow.compiler.xla.service.hlo_pb2")
        self.proto = messages.HloModuleProto.FromString(program)
        self.computations = {each.id: each for each in self.proto.computations}
        self.instructions = {i.id: i for each in self.proto.computations for i in each.instructions}

    def walk(self) -> Iterator[Any]:
        """Yield the instructions of the whole program in order. For a loop, yield those of its body once."""
        return self._walk(self.proto.entry_computation_id)

    def walk_step(self, steps_in_a_loop: bool) -> Iterator[Any]:
        """Yield the instructions of one step: those of the body of the first loop if the loop takes the steps."""
        if not steps_in_a_loop:
            return self.walk()
        loop = next(instruction for instruction in self.walk() if instruction.opcode == "while")
        return self._walk(loop.called_computation_ids[0])

    def fused(self, fusion: Any) -> list[Any]:
        """Return the instructions inside a fusion, its root last."""
        return list(self.computations[fusion.called_computation_ids[0]].instructions)

    def opcode(self, instruction: Any) -> str:
        """Return the opcode of an instruction; it ends in "-start" if XLA starts the operation in the background."""
        if instruction.opcode != "async-start":
            return instruction.opcode
        computation = self.computations[instruction.called_computation_ids[0]]
        return f"{self.instructions[computation.root_id].opcode}-start"

    def _walk(self, computation: int) -> Iterator[Any]:
        for number in self.proto.schedule.sequences[computation].instruction_ids:
            instruction = self.instructions[number]
            called = list(instruction.called_computation_ids)
            if instruction.opcode != "call":
                yield instruction
            if instruction.opcode == "while":
                called = called[:1]
            if instruction.opcode in CONTROL | {"call"}:
                for each in called:
                    yield from self._walk(each)
