"""`jaxddp export RUN --out FILE`: the weights of a run for other libraries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jaxddp.commands.parse import parse
from jaxddp.errors import InputError


@dataclass(frozen=True)
class Export:
    """Write the weights of a run's checkpoint, with the names and the layout of torchvision or timm."""

    run: tyro.conf.Positional[Path] = tyro.MISSING
    """The work directory."""
    out: Path = tyro.MISSING
    """The file to write, such as resnet18.safetensors."""
    format: Literal["safetensors"] = "safetensors"
    """safetensors: a state dict, which PyTorch loads with safetensors.torch.load_file."""
    step: str = "best"
    """Which checkpoint: latest, best, or its step. Without validation the best is the latest."""


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises: InputError."""
    options = parse(Export, Export(), "jaxddp export", arguments)
    if not options.run.is_dir():
        raise InputError(f"{options.run}: no such work directory; give one that a run wrote into")
    from jaxddp.experiment.exported_weights import export_run

    print(export_run(options.run, options.step, options.out))
    return 0
