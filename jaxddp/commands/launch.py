"""`jaxddp launch -- COMMAND`: starts a command in several processes of this machine."""

from collections.abc import Sequence
from pathlib import Path

from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch, split
from jaxddp.command_line.parse import parse, parse_recipe, workdir_of
from jaxddp.command_line.words import option
from jaxddp.commands.eval import parse_eval
from jaxddp.commands.train import Train, ended_run
from jaxddp.config import Config
from jaxddp.config.values import HELP
from jaxddp.recipe.sources import recipe_path
from jaxddp.training.listeners.jsonl import RESULT


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code of the first process that failed. Raises: see `launch`."""
    launcher_arguments, command = split(arguments)
    options = parse(Launch, Launch(), "jaxddp launch", launcher_arguments)
    if ended := _ended_run(options, command):
        print(ended)
        return 0
    # Only machine 0 needs the config. Other machines do not read it, because importing Flax takes a second or more.
    return launch(options, command, _config_of(command) if options.machines.elastic and not options.nr else None)


def _ended_run(options: Launch, command: Sequence[str]) -> str:
    """Return lines about the run of a `train` command, if it has ended and there is nothing to train; else "".

    On several machines, the processes decide together, because each machine may see other files.
    """
    kind, *words = command
    if kind != "train" or not words or words[0].startswith("-") or {*HELP} & {*words} or options.machines.most > 1:
        return ""
    workdir = option(words, "--workdir") or workdir_of(recipe_path(words[0]))
    # A recipe is read only if its run may have ended, because it may import much.
    return ended_run(*parse_recipe(Train, "jaxddp train", words)) if (Path(workdir) / RESULT).is_file() else ""


def _config_of(command: Sequence[str]) -> Config | None:
    """Return the config of a `train` or `eval` command; None for other programs. Raises: InputError."""
    kind, *words = command
    if kind not in ("train", "eval") or not words or {*HELP} & {*words}:
        return None
    return (parse_eval(words) if kind == "eval" else parse_recipe(Train, "jaxddp train", words))[1].config
