"""`jaxddp launch -- COMMAND`: start a command in several processes of this machine."""

from collections.abc import Sequence

from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch, split
from jaxddp.command_line.parse import parse, parse_recipe
from jaxddp.commands.eval import Eval
from jaxddp.commands.train import Train
from jaxddp.config import Config
from jaxddp.keys import HELP


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code of the first process that failed. Raises: as `launch`."""
    own, command = split(arguments)
    options = parse(Launch, Launch(), "jaxddp launch", own)
    # Machine 0 decides for all; to read a recipe that imports Flax takes a second or more.
    decides = options.machines.elastic and not options.nr
    return launch(options, command, _config_of(command) if decides else None)


def _config_of(command: Sequence[str]) -> Config | None:
    """The config that a command of jaxddp trains or evaluates; None of other programs. Raises: InputError."""
    kind, *words = command
    if kind not in ("train", "eval") or not words or {*HELP} & {*words}:
        return None
    measures = kind == "eval"
    return parse_recipe(Eval if measures else Train, f"jaxddp {kind}", words, measures=measures)[1].config
