"""Converts functions to ONNX with jax2onnx, and runs them with onnxruntime (the extra `onnx`)."""

import contextlib
import io
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxddp.core.libraries as libraries
from jaxddp.core.errors import InputError
from jaxddp.core.wording import first_line, not_installed


def convert(function: Callable[[Any], Any], example: Any, name: str, output: str) -> bytes:
    """Return the ONNX model of a function of one array. The shape of `example` may contain names of dynamic sizes.

    Raises: InputError if jax2onnx is not installed, or cannot convert an operation of the function.
    """
    # Hide warnings about rules for other JAX releases and about sizes, because the logits are compared later.
    for library in ("jax2onnx", "onnx_ir"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        from jax2onnx import to_onnx
    except ModuleNotFoundError:
        raise _missing("jax2onnx") from None
    # Discard the progress messages of jax2onnx.
    with contextlib.redirect_stdout(io.StringIO()), _accept_named_sizes_in_pad():
        try:
            model: Any = to_onnx(function, [example], input_names=[name], output_names=[output])
        # jax2onnx may raise any error for a network that it cannot convert.
        except Exception as error:
            reason = first_line(error) or type(error).__name__
            raise InputError(f"format=onnx: jax2onnx cannot convert the network: {reason}") from error
    # jax2onnx moves transpositions past elementwise operations, but keeps the shapes of their results as they were
    # (relu6: NHWC in place of NCHW). A runtime infers the shapes itself, and warns of each shape that differs.
    for part in (model.graph, *model.functions):
        del part.value_info[:]
    return model.SerializeToString()


@contextlib.contextmanager
def _accept_named_sizes_in_pad() -> Iterator[None]:
    """Make jax2onnx's rule for `lax.pad` accept names of dynamic sizes in the block. The rule itself expects numbers.

    The module of the rule is not part of jax2onnx's public API. If the module is missing, the conversion of a network
    that pads may fail.
    """
    try:
        from jax2onnx.plugins.jax.lax import pad

        library: Any = pad.ir
        shape = library.Shape
    except (ImportError, AttributeError):
        effect = "a network that pads its images may not be exported with dynamic sizes"
        libraries.warn_missing("jax2onnx", "jax2onnx.plugins.jax.lax.pad.ir", effect)
        yield
        return

    class Named(types.ModuleType):
        """The module `onnx_ir` with a `Shape` that accepts names of sizes."""

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
    """Return a function that runs an ONNX model on the CPU. Raises: InputError if onnxruntime is not installed."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise _missing("onnxruntime") from None
    program: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda array: program.run(None, {name: array})[0]


def _missing(package: str) -> InputError:
    return InputError(f"format=onnx: {not_installed(package, 'onnx')}")
