"""`jaxddp eval RUN`: measure a checkpoint on the validation split."""

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
    """The work directory of the run."""
    step: str = "latest"
    """The checkpoint: latest, best, or its step. A damaged checkpoint is an error."""


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code. The first argument is a run or its config. Raises: InputError."""
    options, file = parse_recipe(Eval, "jaxddp eval", arguments, measures=True)
    if not options.workdir.is_dir():
        raise InputError(f"{options.workdir}: no such work directory; check --workdir")
    with doing(IMPORTING):
        from jaxddp.job.membership import peers
        from jaxddp.tasks.run_evaluation import evaluate

    measured = evaluate(file, options.workdir, options.step)
    if peers().is_first:
        print(*(f"{metric}: {_as_text(value)}" for metric, value in measured.items()), sep="\n")
    return 0


def _as_text(value: float) -> str:
    """Return a count with all digits, or a measured value with the seven digits of a float32."""
    return str(value) if isinstance(value, int) else f"{value:.7g}"
