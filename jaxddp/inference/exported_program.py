"""A trained network as one file that answers by itself: from pixels to logits, for any number of images.

Beside FILE lies FILE.json, which says what it takes and which classes it tells apart.
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
"""What a StableHLO program runs on."""
INPUT, OUTPUT = "images", "logits"

Logits = Callable[[Any], jax.Array]
"""From pixels [B, H, W, C] to logits float32[B, K]."""
_TRIED = 3
_TOLERANCE = 1e-4
"""Of logits up to 1, and in proportion above."""


def export_program(run: TrainedRun, out: str | Path, form: str | None = None) -> str:
    """Write a run's network, with its parameters and the normalization of pixels, as a program; returns what it did.

    The format is what the file's name ends in unless given.

    It takes uint8 (or uint16) [B, H, W, C] with any B, as evaluation crops images, and returns float32[B, K].
    "stablehlo" is what `jax.export.deserialize` reads, "onnx" what onnxruntime does. Before it is written it answers
    for a few random images here, as the network does.

    Raises:
        InputError: a package is not installed, the network has an operation that the format lacks, or the file cannot
            be written.
        JaxddpError: the program's answers are not the network's.
    """
    if not isinstance(run, TrainedRun):
        raise InputError(f"run={show(run)}: give what jaxddp.load_run returns")
    out, writers = files.check_out(Path(files.check_path(out, "out"))), {"stablehlo": _stablehlo, "onnx": _onnx}
    form = str(checked(form, str | None, "form") or out.suffix[1:].lower())
    if form not in writers:
        raise InputError(f"{out}: its name says no format; {choices(form, writers)}, or give form=")
    function, write = logits_of(run), writers[form]
    content, answer = write(function, run.signature)
    pixels = np.random.default_rng(0).integers(
        0, np.iinfo(run.signature.dtype).max, (_TRIED, *run.signature.image_shape)
    )
    pixels = pixels.astype(run.signature.dtype)
    expected = np.asarray(jax.jit(function)(pixels))
    if not np.isfinite(expected).all():
        raise JaxddpError(f"{out}: not written: the network's logits of random pixels are not finite")
    # An image alone too: its answer must not depend on those beside it.
    difference = max(float(np.abs(answer(some) - expected[: len(some)]).max()) for some in (pixels, pixels[:1]))
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise JaxddpError(f"{out}: not written: the program's logits differ from the network's by {difference:g}")
    # Where the program is, what lies beside it is its own.
    files.remove(out)
    files.replace(Path(f"{out}.json"), (json.dumps(description(run, form), indent=2) + "\n").encode())
    files.replace(out, content)
    return (
        f"{out}: {size(len(content))}, step {run.step} of {run.directory}; logits within {difference:.1g} of the "
        f"network's; classes and sizes in {out}.json"
    )


def logits_of(run: TrainedRun) -> Logits:
    """The logits of pixels, as evaluation computes them; parameters are constants."""
    objective = run.classifier(run.model).objective()
    params, model_state = jax.device_get((run.state.params, run.state.model_state))

    def logits(pixels: Any) -> jax.Array:
        batch = Batch(pixels, label=None, mask=None, row=None, epoch=None)
        images = run.preprocess(batch, train=False).images
        return objective.predict(params, model_state, images).astype(jnp.float32)

    return logits


def description(run: TrainedRun, form: str) -> dict[str, Any]:
    """What FILE.json says."""
    signature = run.signature
    height, width, channels = signature.image_shape
    return {
        "format": form,
        "input": {"name": INPUT, "dtype": signature.dtype, "shape": ["B", height, width, channels]},
        "output": {"name": OUTPUT, "dtype": "float32", "shape": ["B", len(run.class_ids)]},
        "short_side": height if signature.in_memory else run.config.data.resize,
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
    # What a network that somebody else wrote may raise while JAX traces it.
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise InputError(
            f"the network cannot be exported for any number of images ({reason}); take their number from images.shape, "
            "not len(images), and let nothing else depend on it"
        ) from error
    return content, lambda pixels: np.asarray(jax.export.deserialize(bytearray(content)).call(pixels))


def _onnx(function: Logits, signature: Signature) -> tuple[bytes, Callable[[np.ndarray], np.ndarray]]:
    pixels = jax.ShapeDtypeStruct(("B", *signature.image_shape), signature.dtype)
    content = onnx_file.convert(function, pixels, INPUT, OUTPUT)
    return content, onnx_file.session(content, INPUT)
