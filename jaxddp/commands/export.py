"""`jaxddp export RUN --out FILE`: write a run's weights or its network as a program, or a folder to publish."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from jaxddp.command_line.parse import check_run, parse
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.errors import InputError, choices
from jaxddp.core.phases import doing

ExportFormat = Literal["safetensors", "stablehlo", "onnx", "hub"]


@dataclass(frozen=True)
class Export:
    """Write the network of a checkpoint as a file of weights, as a program from pixels to logits, or as a folder."""

    run: tyro.conf.Positional[Path] = tyro.MISSING
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


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code. Raises: InputError."""
    options = parse(Export, Export(), "jaxddp export", arguments)
    formats = get_args(ExportFormat)
    form = options.format or options.out.suffix[1:].lower()
    if form not in formats:
        raise InputError(f"{options.out}: its extension names no format; {choices(form, formats)}, or give --format")
    check_run(options.run)
    with doing(IMPORTING):
        from jaxddp.inference.exports import export_program, export_run, write_folder
        from jaxddp.inference.trained import restore_run
        from jaxddp.mesh import Topology

    if form in ("hub", "safetensors"):
        write = write_folder if form == "hub" else export_run
        print(write(options.run, options.step, options.out))
        return 0
    # On a CPU, onnxruntime supports few operations in bfloat16.
    precision = "float32" if form == "onnx" else None
    trained = restore_run(options.run, options.step, Topology.create(1), precision=precision)
    with doing(f"making the program {options.out}"):
        summary = export_program(trained, options.out, form)
    print(summary)
    return 0
