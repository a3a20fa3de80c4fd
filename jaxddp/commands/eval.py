"""`jaxddp eval RUN|WEIGHTS`: measure a checkpoint, or published weights, on the validation split."""

from dataclasses import dataclass, replace
from pathlib import Path

from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe, parse_weights, workdir_of
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.command_line.words import config_and_words, option
from jaxddp.config.values import HELP
from jaxddp.core.errors import InputError, Key
from jaxddp.core.phases import doing
from jaxddp.recipe.file import RecipeFile
from jaxddp.recipe.sources import recipe_path

_INITIAL = "0"


@dataclass(frozen=True)
class Eval:
    """Evaluate a checkpoint of a run on the validation split, with the run's own settings.

    In place of a run, give weights as in model.weights (timm/resnet50.a1_in1k, a file), or a recipe that names some and
    was not trained yet. Nothing is trained or written, and no work directory is needed.

    Example: jaxddp eval digits --workdir runs/first, or jaxddp eval runs/first --step best
    """

    config: ConfigOfRecipe
    workdir: Path
    """The work directory of the run."""
    step: str = "latest"
    """The checkpoint: latest, best, or its step; 0 for the weights before training. A damaged checkpoint is an
    error."""


def run(arguments: list[str]) -> None:
    """Run the command. The first argument is a run, its config, or weights.

    Raises: InputError.
    """
    options, file = parse_eval(arguments)
    with doing(IMPORTING):
        from jaxddp.core.peers import joined
        from jaxddp.inference.trained import evaluate, evaluate_weights
        from jaxddp.training.progress import format_metrics

    if options.step == _INITIAL:
        measured, name = evaluate_weights(file), str(file.config.model.weights or file.path)
    else:
        measured, name = evaluate(file, options.workdir, options.step), str(options.workdir)
    if joined().is_first:
        # A count has all its digits, and a measured value the seven digits of a float32.
        texts = {key: str(value) if isinstance(value, int) else f"{value:.7g}" for key, value in measured.items()}
        print(*map(": ".join, texts.items()), sep="\n")
        print(f"{name}: {format_metrics({key: value for key, value in measured.items() if key != 'step'})}")


def parse_eval(arguments: list[str]) -> tuple[Eval, RecipeFile]:
    """Parse the arguments; the step is "0" for weights. Raises: InputError."""
    from jaxddp.weights.places import is_weights

    name, rest = config_and_words("eval", arguments)
    workdir, step, weights = (option(rest, key) for key in ("--workdir", "--step", "--model.weights"))
    has_weights = weights is not None or (name not in HELP and is_weights(name))
    if has_weights and (workdir, step) not in ((None, None), (None, _INITIAL)):
        key = "--step" if workdir is None else "--workdir"
        raise InputError(f"{key}: {weights or name} is no run, and has no checkpoints; leave it out")
    if has_weights and weights is None:
        options, file = parse_weights(Eval, "jaxddp eval", arguments)
        return replace(options, step=_INITIAL), file
    may_be_run = step != _INITIAL and weights is None
    may_be_run &= workdir is not None or name in HELP or workdir_of(recipe_path(name)).is_dir()
    options, file = parse_recipe(Eval, "jaxddp eval", arguments, measures=may_be_run)
    if not options.workdir.is_dir() if may_be_run else step is None and file.config.model.weights is None:
        advice = ("check --workdir, or name weights to evaluate (", Key("model.weights"), ")")
        raise InputError(f"{options.workdir}: no such work directory", advice=advice)
    return options if may_be_run or step is not None else replace(options, step=_INITIAL), file
