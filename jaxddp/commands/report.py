"""`jaxddp report RUN…`: write an HTML page about runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.core.phases import doing


@dataclass(frozen=True)
class ReportRuns:
    """Write one HTML file about runs: curves, settings, seeds, speed, classes and mistakes.

    The file loads nothing from the network.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = tyro.MISSING
    """The work directories of the runs."""
    out: Path = tyro.MISSING
    """The file to write, such as report.html."""
    step: str = "best"
    """The checkpoint that classifies the validation data: latest, best, or its step."""
    predictions: bool = True
    """Classify the validation data. Without this, only the runs' files are read, which takes about a second."""
    features: bool = False
    """Draw a map of the features of the validation images (t-SNE, or UMAP where umap-learn is installed)."""
    data_path: Annotated[str | None, tyro.conf.arg(name="data.path")] = None
    """The location of the runs' data, if the data were moved."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options = parse(ReportRuns, ReportRuns(), "jaxddp report", arguments)
    from jaxddp.reports.compose import write_report

    checkpoint = options.step if options.predictions else None
    with doing("reading the runs"):
        summary = write_report(options.runs, options.out, checkpoint, options.data_path, features=options.features)
    print(summary)
