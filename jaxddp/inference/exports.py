"""Exports a trained network: its weights, or a program from pixels to logits.

A program is StableHLO, ONNX, a TensorFlow SavedModel or TFLite, and takes any number of images. The file FILE.json
beside the program FILE describes its input and its classes.
"""

import contextlib
import dataclasses
import io
import logging
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import registry, tree
from jaxddp.config.values import checked
from jaxddp.core import errors, files, libraries, phases
from jaxddp.core.errors import InputError, JaxddpError, counted, first_line, requires
from jaxddp.core.peers import ALONE, Peers
from jaxddp.data import opening, order
from jaxddp.data.batch import Batch
from jaxddp.data.source import Source, labels_of
from jaxddp.data.stream.tf_data import tensorflow
from jaxddp.engine import statistics
from jaxddp.inference.predictions import format_of
from jaxddp.inference.trained import Ensemble, TrainedRun, fitted, restore_run
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.adapt import with_frozen_norms
from jaxddp.models.interface import Model, by_path
from jaxddp.models.ops.layers import polynomial_erf
from jaxddp.setup import recipe
from jaxddp.weights.match import namings_of, published
from jaxddp.weights.state_dict import write
from jaxddp.workdir.saved_state import recipe_of_run
from jaxddp.workdir.signature import Signature

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms of a StableHLO program and of a SavedModel."""
ProgramFormat = Literal["stablehlo", "onnx", "savedmodel", "tflite"]
Runner = Callable[[np.ndarray], np.ndarray]
INPUT, OUTPUT = "images", "logits"
Logits = Callable[[Any], jax.Array]
"""A function from pixels [B, H, W, C] to logits float32[B, K]."""
_TOLERANCE = 1e-4
"""The maximum difference between logits. It is relative to the largest logit if the largest logit is above 1."""
IN_PYTHON = "write its weights in Python with jaxddp.export_weights(state, setup, FILE)"
"""The advice for a run whose config does not name its network."""


def export_program(
    run: TrainedRun, out: str | Path, form: str | None = None, precision: tree.ProgramPrecision = "float32"
) -> str:
    """Write a run's network, parameters and normalization of pixels as a program, and return a summary line.

    The program takes pixels [B, H, W, C], uint8 or uint16 with any B, and returns logits float32[B, K]. The images must
    be cropped as for evaluation. Before the program is written, its logits for a few random images are compared with
    the logits of the network.

    Args:
        form: "stablehlo", which `jax.export.deserialize` reads; "onnx", which onnxruntime reads; "savedmodel", a new
            folder for `tf.saved_model.load`; or "tflite". The default is the suffix of the file's name.
        precision: for "onnx" and "tflite", less than float32. The program is then compared with the network by its
            metric on the run's validation data, and any loss is accepted. int8 also needs the training data.

    Raises:
        InputError: a package is not installed, the network has an operation that the format lacks, the data cannot be
            read, or the file cannot be written.
        JaxddpError: the program's logits differ from the network's.
    """
    if not isinstance(run, TrainedRun):
        raise InputError(f"run={errors.show(run)}: give what jaxddp.load_run returns")
    out = files.check_out(Path(files.check_path(out, "out")))
    writers = {"stablehlo": _stablehlo, "onnx": _onnx, "savedmodel": _savedmodel, "tflite": _tflite}
    form = str(checked(form, ProgramFormat | None, "form") or format_of(out, ProgramFormat, ", or give form="))
    function, about = logits_of(run), _description(run, form)
    images = val = None
    precisions = tree.ProgramPrecision if form in ("onnx", "tflite") else Literal["float32"]
    if checked(precision, precisions, "precision") != "float32":
        train, val = opening.open_unchecked(run.config.data, run.config.eval.limit)
        if val.class_ids != run.class_ids:
            raise InputError(f"precision={precision}: {run.origin} has other classes than the data; give its own data")
        if precision == "int8":
            images = opening.chosen_images(train, run.data_of(train), labels_of(train).share(256))
    content, program = writers[form](function, run.signature, precision, images)
    pixels = _random_pixels(3, run.signature)
    expected = np.asarray(jax.jit(function)(pixels))
    if not np.isfinite(expected).all():
        raise JaxddpError(f"{out}: not written: the network's logits of random pixels are not finite")
    # A single image is tested, too, because its logits must not depend on other images.
    difference = max(float(np.abs(program(part) - expected[: len(part)]).max()) for part in (pixels, pixels[:1]))
    most = _TOLERANCE * max(1.0, float(np.abs(expected).max())) if val is None else np.finfo(np.float32).max
    if not difference <= most:
        raise JaxddpError(f"{out}: not written: the program's logits differ from the network's by {difference:g}")
    told = f"logits within {difference:.1g} of the network's"
    if val is not None:
        told, about[precision] = _validated(run, function, program, val)
    # Remove the old program first, so that it is never beside the description of the new program.
    files.remove(out)
    files.replace_json(Path(f"{out}.json"), about)
    if isinstance(content, bytes):
        files.replace(out, content)
    else:
        with files.whole_folder(out) as folder:
            for name, part in content.items():
                files.replace(files.create((folder / name).parent) / name.name, part)
        content = b"".join(content.values())
    return f"{out}: {errors.size(len(content))}, {run.origin}; {told}; classes and sizes in {out}.json"


def _random_pixels(number: int, signature: Signature) -> np.ndarray:
    """Return the pixels of some images of a network's input."""
    rng, shape = np.random.default_rng(0), (number, *signature.image_shape)
    if np.issubdtype(signature.dtype, np.floating):
        return rng.standard_normal(shape).astype(signature.dtype)
    return rng.integers(0, np.iinfo(signature.dtype).max, shape).astype(signature.dtype)


def _validated(run: TrainedRun, function: Logits, program: Runner, val: Source) -> tuple[str, dict[str, Any]]:
    """Measure the network and its program on validation data; return a line and the content for FILE.json."""
    name = {"several labels": "exact_match", "numbers": "mae"}.get(run.signature.label_form, "top1")
    network, metric = jax.jit(function), registry.METRICS.get(name)
    with phases.doing("measuring the program on the validation images"):
        batches = val.eval_batches(order.EvalOrder(len(val), 64), run.data_of(val))
        rows = [(np.asarray(network(batch.image)), program(batch.image), batch.label) for batch in batches]
    *both, labels = (np.concatenate(arrays)[: len(val)] for arrays in zip(*rows, strict=True))
    before, after = (float(np.asarray(metric(logits, labels)).mean(dtype=np.float64)) for logits in both)
    shown = f"{errors.measure(name, before)} -> {errors.figure(name, after)}"
    return f"{shown} on {counted(len(val), 'validation image')}", {"metric": name, "network": before, "program": after}


def logits_of(run: TrainedRun) -> Logits:
    """Return the function that computes logits from pixels as in evaluation, with the parameters as constants."""
    objective = run.objective(run.model)
    params, model_state = jax.device_get((run.state.params, run.state.model_state))

    def logits(pixels: Any) -> jax.Array:
        batch = Batch(pixels, label=None, mask=None, row=None, epoch=None)
        return objective.predict(params, model_state, run.preprocess(batch, train=False).images).astype(jnp.float32)

    return logits


def _description(run: TrainedRun, form: str) -> dict[str, Any]:
    """Return the content of FILE.json."""
    signature, data = run.signature, run.config.data
    return {
        "format": form,
        "input": {"name": INPUT, "dtype": signature.dtype, "shape": ["B", *signature.image_shape]},
        "output": {"name": OUTPUT, "dtype": "float32", "shape": ["B", len(run.class_ids)]},
        "short_side": signature.image_shape[0] if signature.in_memory else data.resize,
        "crop": data.eval_crop,
        "interpolation": data.interpolation,
        "labels": signature.label_form,
        "class_ids": list(run.class_ids),
        "class_names": list(run.class_names),
        "run": run.directory.resolve().name,
        "step": run.step,
        "jax": version("jax"),
    }


@contextlib.contextmanager
def _any_number_of_images() -> Iterator[None]:
    """Turn an error in the block, which traces the network, into an `InputError`."""
    try:
        yield
    # A user's network may raise any error while JAX traces it.
    except Exception as error:
        problem = f"the network cannot be exported for any number of images ({first_line(error)})"
        advice = "use images.shape[0], not len(images), and let no other size depend on their number"
        raise InputError(problem, advice=advice) from error


def _stablehlo(function: Logits, signature: Signature, *_: Any) -> tuple[bytes, Runner]:
    (count,) = jax.export.symbolic_shape("b")
    pixels = jax.ShapeDtypeStruct((count, *signature.image_shape), signature.dtype)
    with _any_number_of_images():
        content = bytes(jax.export.export(jax.jit(function), platforms=PLATFORMS)(pixels).serialize())
    return content, lambda pixels: np.asarray(jax.export.deserialize(bytearray(content)).call(pixels))


def _traced_by_tensorflow(function: Logits, signature: Signature) -> tuple[Any, Any]:
    """Return TensorFlow, and its function that calls the network's StableHLO program."""
    tf = tensorflow("format=savedmodel or tflite")
    # This module imports TensorFlow, too.
    from jax.experimental import jax2tf
    from jaxlib.mlir.dialects import stablehlo

    # TensorFlow is released less often than JAX, which by default writes for readers of the last four weeks only.
    name, span = "get_version_from_compatibility_requirement", stablehlo.StablehloCompatibilityRequirement.WEEK_12
    older = mock.patch.object(stablehlo, name, return_value=getattr(stablehlo, name)(span))
    spec = tf.TensorSpec((None, *signature.image_shape), signature.dtype, INPUT)
    options: Any = {"with_gradient": False, "native_serialization_platforms": PLATFORMS}
    # TensorFlow 2.21 cannot read JAX's operation for the error function.
    with _any_number_of_images(), mock.patch.object(jax.lax, "erf", polynomial_erf), older:
        call: Any = jax2tf.convert(function, polymorphic_shapes=["b, ..."], **options)
        traced = tf.function(lambda images: {OUTPUT: call(images)}, autograph=False, input_signature=[spec])
        return tf, traced.get_concrete_function()


def _savedmodel(function: Logits, signature: Signature, *_: Any) -> tuple[dict[Path, bytes], Runner]:
    tf, call = _traced_by_tensorflow(function, signature)
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(tf.Module(), folder, signatures=call)
        program = tf.saved_model.load(folder).signatures["serving_default"]
        content = {file.relative_to(folder): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    return content, lambda pixels: program(**{INPUT: tf.constant(pixels)})[OUTPUT].numpy()


def _tflite(function: Logits, signature: Signature, precision: str, images: np.ndarray | None) -> tuple[bytes, Runner]:
    tf, call = _traced_by_tensorflow(function, signature)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([call], tf.Module())
    converter.optimizations = [] if precision == "float32" else [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_types = [tf.float16] if precision == "float16" else []
    converter.representative_dataset = None if images is None else lambda: ([image] for image in images[:, None])
    try:
        content = converter.convert()
        with mock.patch("warnings.warn"):  # The interpreter will move to another package.
            runner = tf.lite.Interpreter(model_content=content).get_signature_runner()
        runner(**{INPUT: np.zeros((1, *signature.image_shape), signature.dtype) if images is None else images[:32]})
    # TensorFlow may raise any error for a network that it cannot convert. Some int8 programs divide by zero.
    except Exception as error:
        raise InputError(f"format=tflite: TensorFlow cannot convert the network: {first_line(error)}") from error
    return content, lambda pixels: runner(**{INPUT: pixels})[OUTPUT]


def _onnx(function: Logits, signature: Signature, precision: str, images: np.ndarray | None) -> tuple[bytes, Runner]:
    content = convert(function, jax.ShapeDtypeStruct(("B", *signature.image_shape), signature.dtype))
    content = content if precision == "float32" else _narrow_onnx(content, images)
    return content, session(content)


def _narrow_onnx(content: bytes, images: np.ndarray | None) -> bytes:
    """Return an ONNX model in float16, or in int8 with the ranges of activations of some pixels, [n, H, W, C]."""
    with requires("format=onnx", "onnxruntime", "onnx"):
        from onnxruntime import quantization
        from onnxruntime.transformers.float16 import convert_float_to_float16
    with tempfile.TemporaryDirectory() as folder:
        given, folded, narrow = (Path(folder, name) for name in ("given.onnx", "folded.onnx", "narrow.onnx"))
        given.write_bytes(content)
        # Compute constants in float32, because on a CPU onnxruntime cannot compute them in float16.
        quantization.quant_pre_process(given, folded, skip_symbolic_shape=True)
        if images is None:
            return convert_float_to_float16(str(folded), keep_io_types=True).SerializeToString()
        batches = ({INPUT: image} for image in images[:, None])
        reader: Any = types.SimpleNamespace(get_next=lambda: next(batches, None))
        # Activations have no sign: on x86, onnxruntime 1.32 cannot load some programs whose activations have one.
        options: Any = {"activation_type": quantization.QuantType.QUInt8, "per_channel": True}
        quantization.quantize_static(folded, narrow, reader, op_types_to_quantize=["Conv", "Gemm", "MatMul"], **options)
        return narrow.read_bytes()


def convert(function: Callable[[Any], Any], example: Any) -> bytes:
    """Return the ONNX model of a function of one array. The shape of `example` may contain names of dynamic sizes.

    Raises: InputError if jax2onnx is not installed, or cannot convert an operation of the function.
    """
    # Hide progress, and warnings about rules for other JAX releases and sizes, because the logits are compared later.
    for library in ("jax2onnx", "onnx_ir"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with requires("format=onnx", "jax2onnx", "onnx"):
        from jax2onnx import to_onnx
        from onnx_ir import from_proto, to_proto
        from onnx_ir.passes.common import DeduplicateInitializersPass
    with contextlib.redirect_stdout(io.StringIO()), _accept_named_sizes_in_pad():
        try:
            model: Any = to_onnx(function, [example], input_names=[INPUT], output_names=[OUTPUT])
        # jax2onnx may raise any error for a network that it cannot convert.
        except Exception as error:
            raise InputError(f"format=onnx: jax2onnx cannot convert the network: {first_line(error)}") from error
    # The views of an image have copies of the kernels.
    model = to_proto(DeduplicateInitializersPass(size_limit=1 << 40)(from_proto(model)).model)
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

    named = {"Shape": lambda sides: shape([side if isinstance(side, int) else str(side) for side in sides])}
    with mock.patch.object(pad, "ir", types.SimpleNamespace(**vars(library) | named)):
        yield


def session(content: bytes) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that runs an ONNX model on the CPU. Raises: InputError if onnxruntime is not installed."""
    with requires("format=onnx", "onnxruntime", "onnx"):
        import onnxruntime
    program: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda array: program.run(None, {INPUT: array})[0]


def averaged(runs: Sequence[Path], which: str, precision: tree.Precision | None = None, **changes: Any) -> TrainedRun:
    """Return the network with the mean of the parameters of several runs, a model soup (arXiv:2203.05482).

    Its batch statistics are those of the training batches of the first run, with some `changes` of its config, such as
    the place of the data. Frozen layers keep theirs.

    Raises: InputError if a run or the data cannot be read, or the networks or the classes differ.
    """
    topology, config = Topology.create(1), recipe_of_run(runs[0]).config.replace(**changes)
    members = [restore_run(directory, which, topology, precision=precision) for directory in runs]
    soup, shape = Ensemble.of(members), members[0].signature.image_shape
    states = [fitted(soup.model, member.state, shape, member.directory) for member in members]
    trees = ((state.params, state.model_state) for state in states)
    params, start = jax.tree.map(lambda *leaves: np.mean(leaves, 0, np.float64).astype(leaves[0].dtype), *trees)
    key, preprocess = jax.random.key(config.seed), Preprocess.of(soup.config, config.data.augment)
    trained = with_frozen_norms(soup.model, config.frozen_norms)

    def after(model_state: Any, batch: Batch) -> Any:
        images = preprocess(batch, train=True, key=key).images
        updated = trained.apply(params, model_state, images, train=True, key=key)[1]
        # There is one device, so this only marks the arrays as equal on all devices.
        return jax.tree.map(lambda leaf: jax.lax.pmax(leaf, AXIS), updated)

    step = jax.jit(jax.shard_map(after, mesh=topology.mesh, in_specs=(jax.P(), jax.P(AXIS)), out_specs=jax.P()))
    if jax.tree.leaves(start):
        with phases.doing("computing batch statistics"):
            train = opening.open_full_splits(config.data)["train"]
            rows = recipe.make_order(train, config, topology)
            batches = map(topology.place, train.train_batches(rows, config.data, range(statistics.PASSES)))
            start = statistics.mean_statistics(start, step, batches)
    return dataclasses.replace(soup, state=soup.state.replace(params=params, model_state=start))


def arrays_of(network: TrainedRun) -> dict[str, np.ndarray]:
    """Return the arrays of a network by path, such as "params/conv1/kernel"."""
    return {path: np.asarray(x) for path, x in by_path(network.state.params, network.state.model_state).items()}


def write_weights(
    out: Path, model: Model, arrays: dict[str, np.ndarray], peers: Peers = ALONE, library: str | None = None
) -> int:
    """Write arrays under their published names, and return their number. Only the first process writes.

    Args:
        arrays: the arrays of the network by path, such as "params/conv1/kernel".
        library: the library whose names the arrays get; the default is that of the first naming.

    Raises: InputError if the file cannot be written, or jaxddp does not know the library's names of this network.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: its name must end in .safetensors")
    if not (namings := namings_of(model, library)):
        raise InputError(f"--names {library}: no names of this network in {library} are known; leave it out")
    constants: Any = getattr(getattr(model, "module", model), "published_constants", dict)
    named = published(arrays, namings[0]) | ({} if library == "timm" else constants())
    if peers.is_first:
        write(out, named)
    return len(named)
