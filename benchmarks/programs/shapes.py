"""Sizes and dtypes of the shapes in a compiled program (`xla_data_pb2.Shape`)."""

import importlib
import math
import re
from typing import Any


def leaves(shape: Any) -> list[Any]:
    """Return the array shapes of a shape, which may be a nested tuple."""
    return [leaf for each in shape.tuple_shapes for leaf in leaves(each)] if shape.tuple_shapes else [shape]


def size(shape: Any) -> int:
    """Return the number of elements of an array."""
    return math.prod(shape.dimensions)


def num_bytes(shape: Any) -> int:
    """Return the bytes of all arrays of a shape."""
    return sum(size(leaf) * _bits(leaf) // 8 for leaf in leaves(shape))


def dtype_of(instruction: Any) -> str:
    """Return the dtype of an instruction's first result, such as "bf16"."""
    return _name(leaves(instruction.shape)[0]).lower()


def _name(shape: Any) -> str:
    return importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").PrimitiveType.Name(shape.element_type)


def _bits(shape: Any) -> int:
    """Return the bits of an element, 0 if it is not a number: "PRED" has 8, "BF16" 16, "F8E4M3FN" 8."""
    name = _name(shape)
    found = re.match(r"[A-Z]+?(\d+)", name)
    return 8 if name == "PRED" else int(found[1]) if found else 0
