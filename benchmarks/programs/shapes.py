"""Shapes of a compiled program, as XLA's messages (`xla_data_pb2.Shape`) hold them."""

import importlib
import math
import re
from typing import Any


def leaves(shape: Any) -> list[Any]:
    """The arrays of a shape, which may be a tuple of tuples."""
    return [leaf for each in shape.tuple_shapes for leaf in leaves(each)] if shape.tuple_shapes else [shape]


def size(shape: Any) -> int:
    """Elements of one array."""
    return math.prod(shape.dimensions)


def num_bytes(shape: Any) -> int:
    """Of all arrays of a shape."""
    return sum(size(leaf) * _bits(leaf) // 8 for leaf in leaves(shape))


def dtype_of(instruction: Any) -> str:
    """The dtype of an instruction's first result, "bf16"."""
    return _name(leaves(instruction.shape)[0]).lower()


def _name(shape: Any) -> str:
    return importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").PrimitiveType.Name(shape.element_type)


def _bits(shape: Any) -> int:
    """Of an element; 0 of what is no number: "PRED" is a byte, "BF16" has 16 bits, "F8E4M3FN" 8."""
    name = _name(shape)
    found = re.match(r"[A-Z]+?(\d+)", name)
    return 8 if name == "PRED" else int(found[1]) if found else 0
