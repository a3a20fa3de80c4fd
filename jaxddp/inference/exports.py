"""Exports a trained network: its weights under the names of other libraries, or a program from pixels to logits.

A program is StableHLO or ONNX, and takes any number of images. The file FILE.json beside the program FILE describes its
input and its classes.
"""

import contextlib
import io
import json
import logging
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.config.values import checked
from jaxddp.core import files, libraries
from jaxddp.core.errors import InputError, JaxddpError, choices, counted, first_line, not_installed, show, size
from jaxddp.core.peers import ALONE, Peers
from jaxddp.data.batch import Batch
from jaxddp.inference.trained import TrainedRun
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.setup.recipe import model_of
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.weights.match import constants_of, namings_of, published
from jaxddp.weights.state_dict import write
from jaxddp.workdir.saved_state import read_run, recipe_of_run
from jaxddp.workdir.signature import Signature

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms of a StableHLO program."""
INPUT, OUTPUT = "images", "logits"
Logits = Callable[[Any], jax.Array]
"""A function from pixels [B, H, W, C] to logits float32[B, K]."""
_NUM_TEST_IMAGES = 3
_TOLERANCE = 1e-4
"""The maximum difference between logits. It is relative to the largest logit if the largest logit is above 1."""
_ANY_CLASSES = 2
"""An arbitrary number of classes. The names of a network's arrays do not depend on it."""


def export_program(run: TrainedRun, out: str | Path, form: str | None = None) -> str:
    """Write a run's network, with its parameters and the normalization of pixels, as a program.

    The program takes pixels [B, H, W, C], uint8 or uint16 with any B, and returns logits float32[B, K]. The images must
    be cropped as for evaluation. Before the program is written, its logits for a few random images are compared with
    the logits of the network.

    Args:
        form: "stablehlo", which `jax.export.deserialize` reads, or "onnx", which onnxruntime reads. The default is the
            suffix of the file's name.

    Returns:
        A summary line.

    Raises:
        InputError: a package is not installed, the network has an operation that the format lacks, or the file cannot
            be written.
        JaxddpError: the program's logits differ from the network's.
    """
    if not isinstance(run, TrainedRun):
        raise InputError(f"run={show(run)}: give what jaxddp.load_run returns")
    out, writers = files.check_out(Path(files.check_path(out, "out"))), {"stablehlo": _stablehlo, "onnx": _onnx}
    form = str(checked(form, str | None, "form") or out.suffix[1:].lower())
    if form not in writers:
        raise InputError(f"{out}: its extension names no format; {choices(form, writers)}, or give form=")
    function, write = logits_of(run), writers[form]
    content, program = write(function, run.signature)
    rng, shape, dtype = np.random.default_rng(0), (_NUM_TEST_IMAGES, *run.signature.image_shape), run.signature.dtype
    is_float = np.issubdtype(dtype, np.floating)
    pixels = (rng.standard_normal(shape) if is_float else rng.integers(0, np.iinfo(dtype).max, shape)).astype(dtype)
    expected = np.asarray(jax.jit(function)(pixels))
    if not np.isfinite(expected).all():
        raise JaxddpError(f"{out}: not written: the network's logits of random pixels are not finite")
    # A single image is tested, too, because its logits must not depend on other images.
    difference = max(float(np.abs(program(some) - expected[: len(some)]).max()) for some in (pixels, pixels[:1]))
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise JaxddpError(f"{out}: not written: the program's logits differ from the network's by {difference:g}")
    # Remove the old program first, so that it is never beside the description of the new program.
    files.remove(out)
    files.replace(Path(f"{out}.json"), (json.dumps(_description(run, form), indent=2) + "\n").encode())
    files.replace(out, content)
    return (
        f"{out}: {size(len(content))}, step {run.step} of {run.directory}; logits within {difference:.1g} of the "
        f"network's; classes and sizes in {out}.json"
    )


def logits_of(run: TrainedRun) -> Logits:
    """Return the function that computes logits from pixels as in evaluation, with the parameters as constants."""
    objective = run.objective(run.model)
    params, model_state = jax.device_get((run.state.params, run.state.model_state))

    def logits(pixels: Any) -> jax.Array:
        batch = Batch(pixels, label=None, mask=None, row=None, epoch=None)
        images = run.preprocess(batch, train=False).images
        return objective.predict(params, model_state, images).astype(jnp.float32)

    return logits


def _description(run: TrainedRun, form: str) -> dict[str, Any]:
    """Return the content of FILE.json."""
    signature, data = run.signature, run.config.data
    height, width, channels = signature.image_shape
    return {
        "format": form,
        "input": {"name": INPUT, "dtype": signature.dtype, "shape": ["B", height, width, channels]},
        "output": {"name": OUTPUT, "dtype": "float32", "shape": ["B", len(run.class_ids)]},
        "short_side": height if signature.in_memory else data.resize,
        "crop": data.eval_crop,
        "interpolation": data.interpolation,
        "class_ids": list(run.class_ids),
        "class_names": list(run.class_names),
        "run": run.directory.resolve().name,
        "step": run.step,
        "jax": version("jax"),
    }


def _stablehlo(function: Logits, signature: Signature) -> tuple[bytes, Callable[[np.ndarray], np.ndarray]]:
    if find_spec("flatbuffers") is None:
        raise InputError("format=stablehlo: flatbuffers is not installed, which JAX needs; pip install flatbuffers")
    (count,) = jax.export.symbolic_shape("b")
    pixels = jax.ShapeDtypeStruct((count, *signature.image_shape), signature.dtype)
    try:
        exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)(pixels)
        content = bytes(exported.serialize())
    # A user's network may raise any error while JAX traces it.
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise InputError(
            f"the network cannot be exported for any number of images ({reason}); use images.shape[0], "
            "not len(images), and let no other size depend on their number"
        ) from error
    return content, lambda pixels: np.asarray(jax.export.deserialize(bytearray(content)).call(pixels))


def _onnx(function: Logits, signature: Signature) -> tuple[bytes, Callable[[np.ndarray], np.ndarray]]:
    pixels = jax.ShapeDtypeStruct(("B", *signature.image_shape), signature.dtype)
    content = convert(function, pixels, INPUT, OUTPUT)
    return content, session(content, INPUT)


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
        raise InputError(f"format=onnx: {not_installed('jax2onnx', 'onnx')}") from None
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

    def with_names(sides: Any) -> Any:
        return shape([side if isinstance(side, int) else str(side) for side in sides])

    pad.ir = types.SimpleNamespace(**{**vars(library), "Shape": with_names})
    try:
        yield
    finally:
        pad.ir = library


def session(content: bytes, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that runs an ONNX model on the CPU. Raises: InputError if onnxruntime is not installed."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise InputError(f"format=onnx: {not_installed('onnxruntime', 'onnx')}") from None
    program: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda array: program.run(None, {name: array})[0]


def weights_of_run(directory: Path, which: str) -> tuple[int, Model, dict[str, np.ndarray]]:
    """Return the weights of a checkpoint ("latest", "best" or a step).

    Returns:
        The step; the network, with an arbitrary number of classes; and the arrays by path, such as
        "params/conv1/kernel".

    Raises:
        InputError: there is no such checkpoint, or the run's config does not name its network.
    """
    file = recipe_of_run(directory)
    file.check_network("write its weights in Python with jaxddp.export_weights(state, setup, FILE)")
    step, arrays = read_run(directory, which, Topology.create(1))
    return step, model_of(file.config, _ANY_CLASSES, objects_of_hooks(file.hooks)), arrays


def export_run(directory: Path, which: str, out: Path) -> str:
    """Write the weights of a checkpoint as .safetensors, and return a summary line.

    Raises: see `weights_of_run` and `write_weights`.
    """
    step, model, arrays = weights_of_run(directory, which)
    return f"{out}: {counted(write_weights(out, model, arrays), 'array')} of step {step} of {directory}"


def write_weights(out: Path, model: Model, arrays: dict[str, np.ndarray], peers: Peers = ALONE) -> int:
    """Write arrays under their published names, and return their number. Only the first process writes.

    Args:
        arrays: the arrays of the network by path, such as "params/conv1/kernel".

    Raises:
        InputError: the file cannot be written, or its name does not end in .safetensors.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: its name must end in .safetensors")
    named = published(arrays, namings_of(model)[0]) | constants_of(model)
    # If all processes of a job wrote, they would overwrite each other's file.
    if peers.is_first:
        write(out, named)
    return len(named)
