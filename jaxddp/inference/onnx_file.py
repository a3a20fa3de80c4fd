"""ONNX through jax2onnx, and the answers of onnxruntime (the extra `onnx`)."""

import contextlib
import io
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxddp.core.private_names as private_names
from jaxddp.core.errors import InputError
from jaxddp.core.wording import first_line, not_installed


def convert(function: Callable[[Any], Any], example: Any, name: str, output: str) -> bytes:
    """The ONNX model of a function of one array, whose shape may have names for sizes that are open.

    Raises: InputError; jax2onnx is not installed, or knows no operation of ONNX for one of the function's.
    """
    # It warns of each rule that does not know the installed JAX, and of each size; what matters is compared later.
    for library in ("jax2onnx", "onnx_ir"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        from jax2onnx import to_onnx
    except ModuleNotFoundError:
        raise _missing("jax2onnx") from None
    # It prints what it looks at.
    with contextlib.redirect_stdout(io.StringIO()), _open_sizes_padded():
        try:
            model: Any = to_onnx(function, [example], input_names=[name], output_names=[output])
        # What it meets in a network that it does not know can be anything.
        except Exception as error:
            reason = first_line(error) or type(error).__name__
            raise InputError(f"format=onnx: jax2onnx cannot convert the network: {reason}") from error
    return model.SerializeToString()


@contextlib.contextmanager
def _open_sizes_padded() -> Iterator[None]:
    """Have jax2onnx pad arrays of open sizes, whose names its rule for `lax.pad` takes for numbers.

    The rule's module is no part of what jax2onnx documents. Without it a network that pads may be refused.
    """
    try:
        from jax2onnx.plugins.jax.lax import pad

        library: Any = pad.ir
        shape = library.Shape
    except (ImportError, AttributeError):
        lost = "a network that pads its images may not be exported with sizes that are open"
        private_names.say_lost("jax2onnx", "jax2onnx.plugins.jax.lax.pad.ir", lost)
        yield
        return

    class Named(types.ModuleType):
        """`onnx_ir`, but for shapes of sizes that have names."""

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        @staticmethod
        def Shape(sides: Any) -> Any:
            return shape([side if isinstance(side, int) else str(side) for side in sides])

    pad.ir = Named("onnx_ir")
    try:
        yield
    finally:
        pad.ir = library


def session(content: bytes, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """What onnxruntime answers on the CPU. Raises: InputError; it is not installed."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise _missing("onnxruntime") from None
    made: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda array: made.run(None, {name: array})[0]


def _missing(package: str) -> InputError:
    return InputError(f"format=onnx: {not_installed(package, 'onnx')}")
