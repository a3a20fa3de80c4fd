"""`jaxddp eval RUN|WEIGHTS`: measure a checkpoint, or published weights, on the validation split."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe, workdir_of
from jaxddp.command_line.terminal import IMPORTING, print_table
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
    was not trained yet. Nothing is trained, and only --calibrate writes a file.

    Short forms: --metrics top1,ece for --eval.metrics, and --precision float32 for --train.precision.

    Example: jaxddp eval runs/first --step best, or jaxddp eval timm/resnet50.a1_in1k --data /data/imagenet
    """

    config: ConfigOfRecipe
    workdir: Path
    """The work directory of the run."""
    step: str | None = None
    """The checkpoint: latest, best, or its step; 0 for the weights before training. A damaged checkpoint is an
    error. By default the latest, and with --calibrate the best, which `jaxddp predict` takes."""
    calibrate: bool = False
    """Fit a temperature to the validation data, by which `jaxddp predict` then divides the logits of this checkpoint,
    and write it to calibration.json in the work directory."""
    per_class: bool = False
    """Also print the accuracy of each class, the worst first, and the class that it is most often taken for."""


def run(arguments: list[str]) -> None:
    """Run the command. The first argument is a run, its config, or weights. Raises: InputError."""
    options, file = parse_eval(arguments)
    with doing(IMPORTING):
        from jaxddp.core.peers import joined
        from jaxddp.inference.calibrated import calibrate
        from jaxddp.inference.pretrained import evaluate_weights
        from jaxddp.inference.trained import evaluate_checkpoint
        from jaxddp.training.progress import format_metrics

    which = options.step or ("best" if options.calibrate else "latest")
    if options.calibrate and which == _INITIAL:
        raise InputError("--calibrate: needs a checkpoint of a run, and here are only weights; leave it out")
    calibration = calibrate(file, options.workdir, which) if options.calibrate else None
    classes = list[tuple[Sequence[str], Any]]()
    on_classes = [lambda *found: classes.append(found)] if options.per_class else []
    if which == _INITIAL:
        measured, name = evaluate_weights(file, *on_classes), str(file.config.model.weights or file.path)
    else:
        measured, name = evaluate_checkpoint(file, options.workdir, which, *on_classes), str(options.workdir)
    if joined().is_first:
        if classes:
            _print_classes(*classes[-1])
        # A count has all its digits, and a measured value the seven digits of a float32.
        texts = {key: str(value) if isinstance(value, int) else f"{value:.7g}" for key, value in measured.items()}
        print(*map(": ".join, texts.items()), sep="\n")
        print(f"{name}: {format_metrics({key: value for key, value in measured.items() if key != 'step'})}")
        if calibration:
            print(f"{name}: {calibration}")


def _print_classes(names: Sequence[str], confusion: Any) -> None:
    """Print a row for each class that has examples, from the counts by label (row) and prediction, int[K, K]."""
    rows = []
    for label, (name, counts) in enumerate(zip(names, confusion.tolist(), strict=True)):
        if total := sum(counts):
            right, counts[label] = counts[label], 0
            other = f"{names[counts.index(most)]} ({most:,})" if (most := max(counts)) else ""
            rows.append((right / total, (name, f"{total:,}", f"{right / total:.2%}", other)))
    rows.sort(key=lambda row: row[0])
    print_table(("class", "images", "top-1", "taken for"), [row for _, row in rows])


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
        options, file = parse_recipe(Eval, "jaxddp eval", arguments, of_weights=True)
        return replace(options, step=_INITIAL), file
    may_be_run = step != _INITIAL and weights is None
    may_be_run &= workdir is not None or name in HELP or workdir_of(recipe_path(name)).is_dir()
    options, file = parse_recipe(Eval, "jaxddp eval", arguments, measures=may_be_run)
    if not options.workdir.is_dir() if may_be_run else step is None and file.config.model.weights is None:
        advice = ("check --workdir, or name weights to evaluate (", Key("model.weights"), ")")
        raise InputError(f"{options.workdir}: no such work directory", advice=advice)
    return options if may_be_run or step is not None else replace(options, step=_INITIAL), file
