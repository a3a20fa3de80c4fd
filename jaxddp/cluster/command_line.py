"""The command that a launcher is given: which program it is, and where its output is kept."""

import shutil
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from jaxddp.core.errors import InputError
from jaxddp.core.wording import nearest

COMMANDS = ("train", "eval", "find-lr", "predict", "doctor", "data")
"""A command that begins with one of these runs as `python -m jaxddp`."""


def program_of(command: Sequence[str]) -> list[str]:
    """The program and its arguments; `python` is this interpreter. Raises: InputError; there is none of this name."""
    word = command[0]
    if word in COMMANDS:
        return [sys.executable, "-m", "jaxddp", *command]
    if word in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if shutil.which(word) is None:
        raise InputError(f"launch: {word!r} is neither a command of jaxddp nor a program{nearest(word, COMMANDS)}")
    return list(command)


def default_logs(command: Sequence[str]) -> Path:
    """`logs` in the work directory that a command names, otherwise `runs/launch`."""
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        if word == "--workdir" and following:
            return Path(following) / "logs"
        if word.startswith("--workdir="):
            return Path(word.partition("=")[2]) / "logs"
    return Path("runs/launch")
