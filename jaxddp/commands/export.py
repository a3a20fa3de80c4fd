"""`jaxddp export RUN|WEIGHTS --out FILE`: write a network's weights or its program, or a folder to publish."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jaxddp.command_line.parse import OfRun, parse_network
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing
from jaxddp.inference.predictions import format_of

ExportFormat = Literal["safetensors", "stablehlo", "onnx", "hub"]


@dataclass(frozen=True)
class _ExportOptions:
    out: Path = tyro.MISSING
    """The file to write, such as resnet18.safetensors; for the format hub, a new folder."""
    format: ExportFormat | None = None
    """safetensors: a state dict with the names and shapes of torchvision or timm, which PyTorch reads with
    safetensors.torch.load_file. stablehlo: a program for CPU, CUDA and TPU, which jax.export.deserialize reads. onnx: a
    float32 program for onnxruntime. hub: a folder with the files that `jaxddp push` uploads, which --model.weights
    reads. By default the extension of FILE names the format."""


@dataclass(frozen=True)
class Export(_ExportOptions, OfRun):
    """Write the network of a run or of weights as a file of weights, as a program from pixels to logits, or as a
    folder."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options, place = parse_network(Export, "jaxddp export", arguments)
    form = options.format or format_of(options.out, ExportFormat, ", or give --format")
    with doing(IMPORTING):
        from jaxddp.inference import exports
        from jaxddp.inference.pretrained import trained_network
        from jaxddp.mesh import Topology

    step = getattr(options, "step", "")
    if isinstance(place, Path) and form in ("hub", "safetensors"):
        print((exports.write_folder if form == "hub" else exports.export_run)(place, step, options.out))
        return
    if form == "hub":
        advice = "write safetensors, stablehlo or onnx, or give the work directory of a run"
        raise InputError(f"--format hub: a folder to publish has the settings and the curves of a run; {advice}")
    # On a CPU, onnxruntime supports few operations in bfloat16.
    precision = "float32" if form in ("onnx", "safetensors") else None
    network = trained_network(place, step, Topology.create(1), precision=precision)
    if form == "safetensors":
        print(exports.export_weights_of(network, options.out))
        return
    with doing(f"making the program {options.out}"):
        summary = exports.export_program(network, options.out, form)
    print(summary)
