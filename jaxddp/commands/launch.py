"""`jaxddp launch -- COMMAND`: starts a command in several processes of this machine."""

from collections.abc import Sequence
from dataclasses import replace
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
    if (workdir := _workdir(command)) is not None:
        # On several machines, the processes decide together, because each machine may see other files. A recipe is read
        # only if its run may have ended, because it may import much.
        may_have_ended = options.machines.most == 1 and (workdir / RESULT).is_file()
        if may_have_ended and (ended := ended_run(*parse_recipe(Train, "jaxddp train", command[1:]))):
            print(ended)
            return 0
        options = replace(options, logs=options.logs or workdir / "logs")
    # Only machine 0 needs the config. Other machines do not read it, because importing Flax takes a second or more.
    return launch(options, command, _config_of(command) if options.machines.elastic and not options.nr else None)


def _workdir(command: Sequence[str]) -> Path | None:
    """Return the work directory of a `train` command; None for another command."""
    kind, *words = command
    if kind != "train" or not words or words[0].startswith("-") or {*HELP} & {*words}:
        return None
    return Path(option(words, "--workdir") or workdir_of(recipe_path(words[0])))


def _config_of(command: Sequence[str]) -> Config | None:
    """Return the config of a `train` or `eval` command; None for other programs. Raises: InputError."""
    kind, *words = command
    if kind not in ("train", "eval") or not words or {*HELP} & {*words}:
        return None
    return (parse_eval(words) if kind == "eval" else parse_recipe(Train, "jaxddp train", words))[1].config
