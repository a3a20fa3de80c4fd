"""`jaxddp report RUN…|WEIGHTS`: write an HTML page about runs, or about the mistakes of weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxddp.command_line.parse import parse_network
from jaxddp.core.phases import doing
from jaxddp.reports.tables import runs_below


@dataclass(frozen=True)
class _ReportOptions:
    out: Path = tyro.MISSING
    """The file to write, such as report.html."""
    predictions: bool = True
    """Classify the validation data. Without this, only the runs' files are read, which takes about a second."""
    features: bool = False
    """Draw a map of the features of the validation images (t-SNE, or UMAP where umap-learn is installed)."""


@dataclass(frozen=True)
class ReportRuns(_ReportOptions):
    """Write one HTML file about runs: curves, settings, seeds, speed, classes and mistakes; or about the classes and
    mistakes of weights.

    The file loads nothing from the network.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = tyro.MISSING
    """The work directories of the runs, or folders above them, such as a sweep's. In their place, weights as in
    model.weights, or a recipe with weights."""
    step: str = "best"
    """The checkpoint that classifies the validation data: latest, best, or its step."""
    data_path: Annotated[str | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    """Other data, or the new place of the runs' data."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options, place = parse_network(ReportRuns, "jaxddp report", arguments)
    from jaxddp.reports.compose import write_report, write_report_of_weights

    with doing("reading the runs"):
        if not isinstance(place, Path):
            summary = write_report_of_weights(place, options.out, features=options.features)
        else:
            checkpoint = options.step if options.predictions else None
            runs = [run for folder in options.runs for run in runs_below(folder) or [folder]]
            summary = write_report(runs, options.out, checkpoint, options.data_path, features=options.features)
    print(summary)
