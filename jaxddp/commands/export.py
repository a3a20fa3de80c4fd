"""`jaxddp export RUN --out FILE`: write a run's weights or its network as a program, or a folder to publish."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jaxddp.command_line.parse import RunDirectory, parse
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.phases import doing
from jaxddp.inference.predictions import format_of

ExportFormat = Literal["safetensors", "stablehlo", "onnx", "hub"]


@dataclass(frozen=True)
class Export:
    """Write the network of a checkpoint as a file of weights, as a program from pixels to logits, or as a folder."""

    run: tyro.conf.Positional[RunDirectory] = tyro.MISSING
    """The work directory of the run."""
    out: Path = tyro.MISSING
    """The file to write, such as resnet18.safetensors; for the format hub, a new folder."""
    format: ExportFormat | None = None
    """safetensors: a state dict with the names and shapes of torchvision or timm, which PyTorch reads with
    safetensors.torch.load_file. stablehlo: a program for CPU, CUDA and TPU, which jax.export.deserialize reads. onnx: a
    float32 program for onnxruntime. hub: a folder with the files that `jaxddp push` uploads, which --model.weights
    reads. By default the extension of FILE names the format."""
    step: str = "best"
    """The checkpoint: latest, best, or its step. Without validations, best is the latest."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options = parse(Export, Export(), "jaxddp export", arguments)
    form = options.format or format_of(options.out, ExportFormat, ", or give --format")
    with doing(IMPORTING):
        from jaxddp.inference.exports import export_program, export_run, write_folder
        from jaxddp.inference.trained import restore_run
        from jaxddp.mesh import Topology

    if form in ("hub", "safetensors"):
        print((write_folder if form == "hub" else export_run)(options.run, options.step, options.out))
        return
    # On a CPU, onnxruntime supports few operations in bfloat16.
    net = restore_run(options.run, options.step, Topology.create(1), precision="float32" if form == "onnx" else None)
    with doing(f"making the program {options.out}"):
        summary = export_program(net, options.out, form)
    print(summary)
