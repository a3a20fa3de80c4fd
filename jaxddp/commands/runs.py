"""`jaxddp runs DIR`: list the runs in a directory with their progress and their metrics.

The command reads files only. It needs no JAX, and the runs may still be training.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.command_line.terminal import print_table
from jaxddp.core.errors import InputError, on_screen
from jaxddp.reports.tables import read_runs, run_table, runs_below


@dataclass(frozen=True)
class ListRuns:
    """List the runs in a directory and in the folders below it."""

    directory: tyro.conf.Positional[Path] = Path("runs")
    """The directory."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options = parse(ListRuns, ListRuns(), "jaxddp runs", arguments)
    if not options.directory.is_dir():
        raise InputError(f"{options.directory}: no such directory; give one that contains work directories")
    workdirs = runs_below(options.directory)
    if not workdirs:
        print(f"{options.directory}: contains no runs")
        return
    runs = read_runs(workdirs)
    table = run_table(runs)
    print_table(table.titles, [[cell.text for cell in row] for row in table.rows])
    for line in (f"{run.name}: {fault}" for run in runs for fault in run.faults):
        print(on_screen(line))
