"""`jaxddp eval RUN`: the metrics of a checkpoint on the validation split."""

from dataclasses import dataclass
from pathlib import Path

from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing


@dataclass(frozen=True)
class Eval:
    """Evaluate a checkpoint of a run on the validation split, with the run's own settings.

    Example: jaxddp eval digits --workdir runs/first, or jaxddp eval runs/first --step best
    """

    config: ConfigOfRecipe
    workdir: Path
    """Where the run's checkpoints are."""
    step: str = "latest"
    """Which checkpoint: latest, best, or its step. One that is damaged is an error."""


def run(arguments: list[str]) -> int:
    """Run the command, whose first argument is a run or its config; returns the exit code. Raises: InputError."""
    options, file = parse_recipe(Eval, "jaxddp eval", arguments, measures=True)
    if not options.workdir.is_dir():
        raise InputError(f"{options.workdir}: no such work directory; check --workdir")
    with doing(IMPORTING):
        from jaxddp.job.membership import peers
        from jaxddp.tasks.run_evaluation import evaluate

    measured = evaluate(file, options.workdir, options.step)
    if peers().is_first:
        print(*(f"{metric}: {_shown(value)}" for metric, value in measured.items()), sep="\n")
    return 0


def _shown(value: float) -> str:
    """Counts as they are, and what was measured with the seven digits of a float32."""
    return str(value) if isinstance(value, int) else f"{value:.7g}"
