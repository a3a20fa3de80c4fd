"""`jaxddp doctor [CONFIG]`: look a machine, a job and a config over before a run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxddp.commands.parse import ConfigOfRecipe, parse, parse_recipe

if TYPE_CHECKING:
    from jaxddp.cluster.checklist import CheckRow


@dataclass(frozen=True)
class Doctor:
    """Check this machine, and all processes of the job that it is in."""

    workdir: Path | None = None
    """Also whether a run could write there."""


@dataclass(frozen=True)
class DoctorOfConfig:
    """Check this machine and what a run of the config needs: its data, its compiled step, room for its checkpoints."""

    config: ConfigOfRecipe
    workdir: Path
    """Where the run would write."""


def run(arguments: list[str]) -> int:
    """Run the command on its words; returns the exit code: 1 where a check failed. Raises: InputError."""
    if arguments and not arguments[0].startswith("-"):
        options, file = parse_recipe(DoctorOfConfig, "jaxddp doctor", arguments)
    else:
        options, file = parse(Doctor, Doctor(), "jaxddp doctor", arguments), None
    from jaxddp.cluster.checklist import doctor, speaks

    rows = doctor(file, options.workdir)
    if speaks():
        _show(rows)
    return int(any(row.verdict == "fail" for row in rows))


def _show(rows: "list[CheckRow]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("check", "verdict", "detail", box=box.SIMPLE)
    for row in rows:
        table.add_row(row.check, Text(row.verdict, styles[row.verdict]), Text(row.detail, overflow="fold"))
    # A file, or the prefix of a launcher, has no width that a row would have to keep to.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
