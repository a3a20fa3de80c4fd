"""`jaxddp find-lr CONFIG`: run a range test of the learning rate, draw it, and suggest a rate."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from jaxddp.command_line.parse import ConfigOfRecipe, parse_recipe, workdir_of
from jaxddp.command_line.terminal import IMPORTING
from jaxddp.command_line.words import by_key, options_of
from jaxddp.core.errors import NonFiniteError, counted
from jaxddp.core.phases import doing
from jaxddp.core.ranges import Positive, Range


@dataclass(frozen=True)
class FindLr:
    """Train a config for a few steps with a rising learning rate, and suggest one. No work directory is changed.

    Example: jaxddp find-lr digits --data data/digits --highest 1 --out rates.png
    """

    config: ConfigOfRecipe
    lowest: Positive = 1e-6
    """The learning rate of the first step."""
    highest: Positive = 10.0
    """The learning rate of the last step."""
    steps: Annotated[int, Range(10, 100_000)] = 100
    """The number of steps; the test ends earlier if the loss diverges."""
    out: Path = Path("find_lr.png")
    """The picture to write."""


def run(arguments: list[str]) -> None:
    """Run the command. The first argument is the config. Raises: see `jaxddp.core.errors`."""
    options, file = parse_recipe(FindLr, "jaxddp find-lr", arguments)
    with doing(IMPORTING):
        import jaxddp.core.files as files
        from jaxddp.rate_range import RateRange, config_of_test, find_rate
        from jaxddp.schedules import batch_factor
        from jaxddp.setup.run_setup import initialize, open_recipe
        from jaxddp.training.pictures import png, rate_figure

    out, rates = files.check_out(options.out), RateRange(options.lowest, options.highest, options.steps)
    recipe = open_recipe(replace(file, config=config_of_test(file.config, rates)), rates.schedule)
    test = find_rate(initialize(recipe), rates)
    if not recipe.topology.peers.is_first:
        return
    if not test.losses:
        raise NonFiniteError("the loss of the first step is not finite; check the data, the loss and the weights")
    rate, steepest, diverged = test.suggestion()
    files.replace(out, png(rate_figure(test.step_rates, test.losses, test.smoothed, rate)))
    ended = "does not diverge" if diverged is None else f"diverges at {diverged:.2g}"
    steps = counted(len(test.losses), "step")
    print(f"{steps} at rates from {rates.lowest:g} to {test.step_rates[-1]:.2g}: {options.out}")
    if rate is None:
        print(f"the loss never falls, and {ended}; no rate is suggested: check the data, or try other rates")
        return
    print(f"the loss falls fastest at {steepest:.2g}, and {ended}; suggested: {rate:.2g}")
    words = words_to_train(arguments)
    if file.is_run:
        # A run cannot continue in its work directory with another learning rate.
        words += ["--workdir", f"{workdir_of(file.path)}-lr{rate:.2g}"]
    # If the config has a reference batch size, the key is the learning rate for this size.
    print(f"jaxddp train {shlex.join(words)} --optimizer.learning-rate {rate / batch_factor(file.config):.2g}")


def words_to_train(arguments: list[str]) -> list[str]:
    """Return the words of the command without the options of the test and the learning rate."""
    own = {*FindLr.__annotations__, "optimizer.learning_rate"}
    return [word for key, words in by_key(arguments, options_of(FindLr)) if key not in own for word in words]
