"""The content of a report, and its HTML file, which contains all styles, scripts and images.

Values from a run, such as the names of its classes, are untrusted. The template escapes them, and the page's content
security policy forbids loading anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxddp.core.errors import InputError
from jaxddp.core.wording import not_installed
from jaxddp.reports.charts import Chart, Positions
from jaxddp.reports.text_tables import TextTable

if TYPE_CHECKING:
    from jaxddp.reports.classes import RunClasses


class LegendEntry(NamedTuple):
    """A run in the legend."""

    name: str
    colour: str


class CurveSection(NamedTuple):
    """Charts of all logged metrics.

    Attributes:
        positions: the x values of the points of the charts, on each x axis.
        logarithmic: whether the y axis of the loss is logarithmic when the page opens.
    """

    charts: Sequence[Chart]
    positions: Positions
    logarithmic: bool


class SeedSection(NamedTuple):
    """Runs that differ in their seed alone: charts of their means, and a table of their spreads."""

    charts: Sequence[Chart]
    positions: Positions
    table: TextTable


class ClassSection(NamedTuple):
    """The predictions of checkpoints for validation data.

    Attributes:
        accuracies: tables of the accuracy of each class. Runs with the same classes share a table.
        faults: a line for each run without predictions, with the reason.
    """

    accuracies: Sequence[TextTable] = ()
    runs: "Sequence[RunClasses]" = ()
    faults: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The content of a report. A section without charts, rows and faults is omitted.

    Attributes:
        runs: a table with a row for each run.
        faults: a line for each missing or damaged file of a run.
        settings: the settings that differ between runs, or the settings of a single run that are not the default.
        speed: a table of speed, memory and time.
    """

    title: str
    runs: TextTable
    legend: Sequence[LegendEntry]
    faults: Sequence[str]
    curves: CurveSection
    seeds: SeedSection
    settings: TextTable
    speed: TextTable
    classes: ClassSection = field(default_factory=ClassSection)

    @property
    def charts(self) -> list[Chart]:
        """All charts that the page's script draws."""
        matrices = [run.matrix for run in self.classes.runs if run.matrix is not None]
        maps = [run.features.chart for run in self.classes.runs if run.features is not None]
        return [*self.curves.charts, *self.seeds.charts, *matrices, *maps]


def check_libraries() -> None:
    """Raise `InputError` if a library of a report is not installed."""
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"report: {not_installed(str(error.name), 'report')}") from None


def render(page: Page) -> str:
    """Return the page as HTML, with the same text for the same runs. Raises: InputError if a library is missing."""
    check_libraries()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    fields_of_chart = ("id", "data", "layout", "curve", "logarithmic")
    charts = [{name: getattr(chart, name) for name in fields_of_chart} for chart in page.charts]
    figures = {"charts": charts, "positions": page.curves.positions | page.seeds.positions}
    return environment.get_template("page.html").render(page=page, figures=figures, plotly=get_plotlyjs())
