"""`jaxddp launch -- COMMAND`: starts a command in several processes of this machine."""

from collections.abc import Sequence

from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch, split
from jaxddp.command_line.parse import parse, parse_recipe
from jaxddp.commands.eval import Eval
from jaxddp.commands.train import Train
from jaxddp.config import Config
from jaxddp.keys import HELP


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code of the first process that failed. Raises: see `launch`."""
    launcher_arguments, command = split(arguments)
    options = parse(Launch, Launch(), "jaxddp launch", launcher_arguments)
    # Only machine 0 needs the config. Other machines do not read it, because importing Flax takes a second or more.
    needs_config = options.machines.elastic and not options.nr
    return launch(options, command, _config_of(command) if needs_config else None)


def _config_of(command: Sequence[str]) -> Config | None:
    """Return the config of a `train` or `eval` command; None for other programs. Raises: InputError."""
    kind, *words = command
    if kind not in ("train", "eval") or not words or {*HELP} & {*words}:
        return None
    is_eval = kind == "eval"
    return parse_recipe(Eval if is_eval else Train, f"jaxddp {kind}", words, measures=is_eval)[1].config
