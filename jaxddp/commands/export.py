"""`jaxddp export RUN --out FILE`: a run's network for other libraries, or as a program that answers by itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from jaxddp.command_line.parse import check_run, parse
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing
from jaxddp.core.wording import choices

Format = Literal["safetensors", "stablehlo", "onnx"]


@dataclass(frozen=True)
class Export:
    """Write the network of a run's checkpoint: its weights, or a program from pixels to logits."""

    run: tyro.conf.Positional[Path] = tyro.MISSING
    """The work directory."""
    out: Path = tyro.MISSING
    """The file to write, such as resnet18.safetensors."""
    format: Format | None = None
    """safetensors: a state dict with the names and the layout of torchvision or timm, which PyTorch loads with
    safetensors.torch.load_file; stablehlo: a program for CPU, CUDA and TPU, which jax.export.deserialize reads; onnx: a
    program in float32 for onnxruntime. As the name of the file says unless given."""
    step: str = "best"
    """Which checkpoint: latest, best, or its step. Without validation the best is the latest."""


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises: InputError."""
    options = parse(Export, Export(), "jaxddp export", arguments)
    known = get_args(Format)
    form = options.format or options.out.suffix[1:].lower()
    if form not in known:
        raise InputError(f"{options.out}: its name says no format; {choices(form, known)}, or give --format")
    check_run(options.run)
    if form == "safetensors":
        with doing(IMPORTING):
            from jaxddp.inference.exported_weights import export_run

        print(export_run(options.run, options.step, options.out))
        return 0
    with doing(IMPORTING):
        from jaxddp.inference.exported_program import export_program
        from jaxddp.inference.trained import restore_run
        from jaxddp.mesh import Topology

    # onnxruntime computes few operations in bfloat16 on a CPU.
    precision = "float32" if form == "onnx" else None
    trained = restore_run(options.run, options.step, Topology.create(1), precision=precision)
    with doing(f"making the program {options.out}"):
        said = export_program(trained, options.out, form)
    print(said)
    return 0
