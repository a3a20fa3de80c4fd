"""`jaxddp runs DIR`: the runs in a directory, how far they are and how good.

It reads files alone: it needs no JAX, and runs may go on meanwhile.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.command_line.terminal import print_table
from jaxddp.core.errors import InputError
from jaxddp.core.wording import on_screen
from jaxddp.reports.overview import run_table, runs_below
from jaxddp.reports.run_files import read_runs


@dataclass(frozen=True)
class ListRuns:
    """List the runs in a directory, and in folders below it."""

    directory: tyro.conf.Positional[Path] = Path("runs")
    """Where to look."""


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises: InputError."""
    options = parse(ListRuns, ListRuns(), "jaxddp runs", arguments)
    if not options.directory.is_dir():
        raise InputError(f"{options.directory}: no such directory; give one that holds work directories")
    found = runs_below(options.directory)
    if not found:
        print(f"{options.directory}: holds no runs")
        return 0
    runs = read_runs(found)
    table = run_table(runs)
    print_table([column.title for column in table.columns], [[cell.text for cell in row] for row in table.rows])
    print(*(on_screen(f"{run.name}: {fault}") + "\n" for run in runs for fault in run.faults), sep="", end="")
    return 0
