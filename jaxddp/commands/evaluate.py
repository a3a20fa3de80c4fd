"""`jaxddp eval CONFIG --workdir DIR`: the metrics of a checkpoint on the validation split."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from jaxddp.commands.parse import parse, workdir_of
from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.recipe_file import read_recipe


@dataclass(frozen=True)
class Eval:
    """Evaluate a checkpoint of a run on the validation split."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    workdir: Path
    """Where the run's checkpoints are."""
    step: str = "latest"
    """Which checkpoint: latest, best, or its step."""


def run(arguments: list[str]) -> int:
    """Run the command, whose first argument is the config; returns the exit code. Raises: InputError."""
    name, *rest = arguments
    file = read_recipe(name)
    options = parse(Eval, Eval(file.config, workdir_of(name)), f"jaxddp eval {name}", rest)
    if not options.workdir.is_dir():
        raise InputError(f"{options.workdir}: no such work directory; check --workdir")
    from jaxddp.experiment.experiment import check_checkpoint, evaluate, open_experiment

    experiment = open_experiment(replace(file, config=options.config))
    check_checkpoint(options.workdir, options.step)
    for metric, value in evaluate(experiment, options.workdir, options.step).items():
        print(f"{metric}: {value}")
    return 0
