"""`jaxddp train CONFIG`: train a config in a work directory, or continue from its last checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.phases import doing
from jaxddp.job.environment import find_job
from jaxddp.recipe.file import RecipeFile
from jaxddp.training.listeners.jsonl import RESULT


@dataclass(frozen=True)
class Train:
    """Train a config, or resume its run.

    Example: jaxddp train digits --data data/digits --epochs 3 --workdir runs/first
    """

    config: ConfigOfRecipe
    workdir: Path
    """The directory for checkpoints, metrics and curves."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the latest intact checkpoint, if there is one. must: it is an error if there is none. never:
    it is an error if there is one."""


def ended_run(options: Train, file: RecipeFile) -> str:
    """Return lines about the run, if it has ended and the command has nothing to train; else "".

    Only files of the work directory are read. In a job, the processes decide together (`jaxddp.setup.run_training`),
    because a network file system may show them different files.
    """
    # A run that has not ended needs none of the imports.
    if options.resume == "never" or not (options.workdir / RESULT).is_file():
        return ""
    from jaxddp.workdir.claim import nothing_to_train

    return nothing_to_train(file, options.workdir)


def run(arguments: list[str]) -> None:
    """Run the command. The first argument is the config. Raises: see `jaxddp.core.errors`."""
    options, file = parse_recipe(Train, "jaxddp train", arguments)
    if find_job() is None and (ended := ended_run(options, file)):
        print(ended)
        return
    with doing(IMPORTING):
        from jaxddp.setup.run_setup import open_recipe
        from jaxddp.setup.run_training import train
        from jaxddp.training.listeners.jsonl import CURVES, METRICS
        from jaxddp.training.progress import progress

    recipe = open_recipe(file)
    train(recipe, options.workdir, resume=options.resume, listeners=[progress()])
    if recipe.topology.peers.is_first:
        outputs = {"curves": options.workdir / CURVES, "metrics": options.workdir / METRICS}
        print("  ".join(f"{name}: {path}" for name, path in outputs.items() if path.exists()))
