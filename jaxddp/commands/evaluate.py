"""`jaxddp eval CONFIG --workdir DIR`: the metrics of a checkpoint on the validation split."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxddp.commands.parse import parse_recipe, workdir_of
from jaxddp.config import Config
from jaxddp.errors import InputError


@dataclass(frozen=True)
class Eval:
    """Evaluate a checkpoint of a run on the validation split."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    workdir: Path
    """Where the run's checkpoints are."""
    step: str = "latest"
    """Which checkpoint: latest, best, or its step. One that is damaged is an error."""


def run(arguments: list[str]) -> int:
    """Run the command, whose first argument is the config; returns the exit code. Raises: InputError."""
    name, *rest = arguments
    options, file = parse_recipe(Eval, "jaxddp eval", name, rest, workdir_of(name))
    if not options.workdir.is_dir():
        raise InputError(f"{options.workdir}: no such work directory; check --workdir")
    from jaxddp.experiment.experiment import evaluate, open_experiment

    experiment = open_experiment(file)
    for metric, value in evaluate(experiment, options.workdir, options.step).items():
        print(f"{metric}: {value}")
    return 0
