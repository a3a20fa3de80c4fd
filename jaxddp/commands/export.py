"""`jaxddp export RUN|WEIGHTS --out FILE`: write a network's weights or its program, or a folder to publish."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxddp.command_line.parse import OfRun, parse_network
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.config.tree import ProgramPrecision
from jaxddp.core.errors import InputError, counted
from jaxddp.core.phases import doing
from jaxddp.inference.predictions import format_of
from jaxddp.sweeps.folder import runs_and_images

ExportFormat = Literal["safetensors", "stablehlo", "onnx", "savedmodel", "tflite", "hub"]


@dataclass(frozen=True)
class _ExportOptions:
    out: Path = tyro.MISSING
    """The file to write, such as resnet18.safetensors; for the formats hub and savedmodel, a new folder."""
    format: ExportFormat | None = None
    """safetensors: a state dict with the names and shapes of torchvision or timm, which PyTorch reads with
    safetensors.torch.load_file. stablehlo: a program for CPU, CUDA and TPU, which jax.export.deserialize reads. onnx: a
    program for onnxruntime. savedmodel: a program for TensorFlow. tflite: a program for phones. hub: a folder with the
    files that `jaxddp push` uploads, which --model.weights reads. By default the extension of FILE names the format."""
    names: Literal["torchvision", "timm"] | None = None
    """For safetensors: the library whose names the arrays get. By default it is timm for ViTs, or else torchvision."""
    precision: ProgramPrecision = "float32"
    """For onnx and tflite: float16 halves the size, int8 quarters it. The loss of accuracy is measured on the
    validation images and printed. int8 measures the ranges of activations on 256 training images."""


@dataclass(frozen=True)
class Export(_ExportOptions, OfRun):
    """Write the network of a run or of weights as a file of weights, as a program from pixels to logits, or as a
    folder."""

    others: tyro.conf.Positional[tuple[str, ...]] = ()
    """With --average: further runs of the same network and classes. A sweep of folds or seeds stands for its runs."""
    average: bool = False
    """Average the parameters of all runs, and compute the batch statistics from the training images of the first."""
    data_path: Annotated[str | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    """For --precision and --average: other data, or the new place of the run's data."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options, place = parse_network(Export, "jaxddp export", arguments)
    form = options.format or format_of(options.out, ExportFormat, ", or give --format")
    if options.precision != "float32" and form not in ("onnx", "tflite"):
        raise InputError(f"--precision {options.precision}: needs --format onnx or tflite; leave it out")
    if options.names is not None and form != "safetensors":
        raise InputError(f"--names {options.names}: needs --format safetensors; leave it out")
    data_path = getattr(options, "data_path", None)
    if data_path is not None and not options.average and options.precision == "float32":
        raise InputError(f"--data {data_path}: is read for --precision and --average only; leave it out")
    with doing(IMPORTING):
        from jaxddp.engine.compilation import keep_compiled_programs
        from jaxddp.inference import exports, published
        from jaxddp.inference.pretrained import trained_network
        from jaxddp.mesh import Topology
        from jaxddp.workdir.saved_state import recipe_of_run

    keep_compiled_programs()  # The import of jax2onnx alone compiles 70 programs.
    if form == "hub" and not isinstance(place, Path):
        advice = "write safetensors, stablehlo or onnx, or give the work directory of a run"
        raise InputError(f"--format hub: a folder to publish has the settings and the curves of a run; {advice}")
    step, network = getattr(options, "step", ""), None
    changes: Any = {} if data_path is None else {"data": {"path": data_path, "name": None}}
    # On a CPU, onnxruntime and TFLite support few operations in bfloat16.
    precision = None if form in ("stablehlo", "hub") else "float32"
    if isinstance(place, Path):
        (place, *others), words = runs_and_images(place, options.others)
        if words or bool(others) is not options.average:
            given = words[0] if words else counted(len(others) + 1, "run")
            raise InputError(f"export: {given}", advice="give one run, or --average and several runs")
        if others:
            network = exports.averaged([place, *others], step, precision, **changes)
        if form == "hub":
            print(published.write_folder(place, step, options.out, network))
            return
        if form == "safetensors":
            recipe_of_run(place).check_network(exports.IN_PYTHON)
    network = network or trained_network(place, step, Topology.create(1), precision=precision)
    if form == "safetensors":
        count = exports.write_weights(options.out, network.model, exports.arrays_of(network), library=options.names)
        print(f"{options.out}: {counted(count, 'array')} of {network.origin}")
        return
    with doing(f"making the program {options.out}"):
        network = replace(network, config=network.config.replace(**changes))
        summary = exports.export_program(network, options.out, form, options.precision)
    print(summary)
