"""`jaxddp doctor [CONFIG]`: checks a machine, a job and a config before a run."""

from dataclasses import dataclass
from pathlib import Path

from jaxddp.command_line.parse import ConfigOfRecipe, page_of, parse, parse_recipe
from jaxddp.command_line.terminal import IMPORTING, print_table
from jaxddp.config.values import HELP
from jaxddp.core.peers import joined
from jaxddp.core.phases import doing

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Doctor:
    """Check this machine, and all processes of its job."""

    workdir: Path | None = None
    """A work directory, to check whether a run can write there."""


@dataclass(frozen=True)
class DoctorOfConfig:
    """Check this machine and the needs of a run of the config: data, a compiled step, space for checkpoints.

    Example: jaxddp doctor digits --data data/digits --workdir runs/first
    """

    config: ConfigOfRecipe
    workdir: Path
    """The work directory of the run."""


def run(arguments: list[str]) -> int:
    """Run the command, and return its exit code: 1 if a check failed. Raises: InputError."""
    if arguments and arguments[0] in HELP:
        parse(*page_of(DoctorOfConfig, optional=True), "jaxddp doctor", arguments)
    if arguments and not arguments[0].startswith("-"):
        options, file = parse_recipe(DoctorOfConfig, "jaxddp doctor", arguments)
    else:
        options, file = parse(Doctor, Doctor(), "jaxddp doctor", arguments), None
    with doing(IMPORTING):
        from jaxddp.cluster.doctor import doctor

    rows = doctor(file, options.workdir)
    if joined().is_first:
        cells = [(row.check, (row.verdict, _STYLES[row.verdict]), row.detail) for row in rows]
        print_table(("check", "verdict", "detail"), cells)
    return int(any(row.verdict == "fail" for row in rows))
