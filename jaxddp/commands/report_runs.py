"""`jaxddp report RUN…`: a page about runs, to be read in a browser."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.core.phases import doing


@dataclass(frozen=True)
class ReportRuns:
    """Write one HTML file about runs: curves, settings, seeds, speed, classes, mistakes. It needs no network."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = tyro.MISSING
    """The work directories."""
    out: Path = tyro.MISSING
    """The file to write, such as report.html."""
    step: str = "best"
    """Which checkpoint is asked for the classes of the validation data: latest, best, or its step."""
    predictions: bool = True
    """Ask it; without, files alone are read, which takes a second."""
    data_path: Annotated[str | None, tyro.conf.arg(name="data.path")] = None
    """Where the data of the runs lie, if they were moved."""


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises: InputError."""
    options = parse(ReportRuns, ReportRuns(), "jaxddp report", arguments)
    from jaxddp.reports.compose import write_report

    which = options.step if options.predictions else None
    with doing("reading the runs"):
        said = write_report(options.runs, options.out, which, options.data_path)
    print(said)
    return 0
