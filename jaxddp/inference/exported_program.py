"""Exports a trained network as a StableHLO or ONNX program that computes logits from any number of images.

The file FILE.json beside the program FILE describes the input and the classes of the program.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.wording import choices, first_line, show, size
from jaxddp.data.batch import Batch
from jaxddp.inference import onnx_file
from jaxddp.inference.trained import TrainedRun
from jaxddp.overrides import checked
from jaxddp.workdir.signature import Signature

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms of a StableHLO program."""
INPUT, OUTPUT = "images", "logits"

Logits = Callable[[Any], jax.Array]
"""A function from pixels [B, H, W, C] to logits float32[B, K]."""
_NUM_TEST_IMAGES = 3
_TOLERANCE = 1e-4
"""The maximum difference between logits. It is relative to the largest logit if the largest logit is above 1."""


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
    pixels = _random_pixels(run.signature)
    expected = np.asarray(jax.jit(function)(pixels))
    if not np.isfinite(expected).all():
        raise JaxddpError(f"{out}: not written: the network's logits of random pixels are not finite")
    # A single image is tested, too, because its logits must not depend on other images.
    difference = max(float(np.abs(program(some) - expected[: len(some)]).max()) for some in (pixels, pixels[:1]))
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise JaxddpError(f"{out}: not written: the program's logits differ from the network's by {difference:g}")
    # Remove the old program first, so that it is never beside the description of the new program.
    files.remove(out)
    files.replace(Path(f"{out}.json"), (json.dumps(description(run, form), indent=2) + "\n").encode())
    files.replace(out, content)
    return (
        f"{out}: {size(len(content))}, step {run.step} of {run.directory}; logits within {difference:.1g} of the "
        f"network's; classes and sizes in {out}.json"
    )


def logits_of(run: TrainedRun) -> Logits:
    """Return the function that computes logits from pixels as in evaluation, with the parameters as constants."""
    objective = run.classifier(run.model).objective()
    params, model_state = jax.device_get((run.state.params, run.state.model_state))

    def logits(pixels: Any) -> jax.Array:
        batch = Batch(pixels, label=None, mask=None, row=None, epoch=None)
        images = run.preprocess(batch, train=False).images
        return objective.predict(params, model_state, images).astype(jnp.float32)

    return logits


def description(run: TrainedRun, form: str) -> dict[str, Any]:
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


def _random_pixels(signature: Signature) -> np.ndarray:
    rng, shape = np.random.default_rng(0), (_NUM_TEST_IMAGES, *signature.image_shape)
    if np.issubdtype(signature.dtype, np.floating):
        return rng.standard_normal(shape).astype(signature.dtype)
    return rng.integers(0, np.iinfo(signature.dtype).max, shape).astype(signature.dtype)


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
    content = onnx_file.convert(function, pixels, INPUT, OUTPUT)
    return content, onnx_file.session(content, INPUT)
