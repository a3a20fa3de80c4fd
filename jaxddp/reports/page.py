"""A report as one HTML file that needs no network: styles, scripts and pictures are in it.

What comes from a run, such as the names of its classes, is untrusted: the template escapes it, and the page forbids
itself to load anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxddp.core.errors import InputError
from jaxddp.core.wording import not_installed
from jaxddp.reports.charts import Chart, Positions
from jaxddp.reports.tables import Table

if TYPE_CHECKING:
    from jaxddp.reports.classes import RunClasses


class Key(NamedTuple):
    """A run in the legend."""

    name: str
    colour: str


@dataclass(frozen=True)
class Page:
    """What the page shows; a section whose tables and charts are empty is left out.

    Attributes:
        faults: what is left out, and why.
        logarithmic: whether the axis of the loss is, until the reader chooses.
        accuracies: of each class, a table for all runs of the same classes.
        charts: those of `classes` are not among them.
    """

    title: str
    runs: Table
    legend: Sequence[Key]
    faults: Sequence[str]
    curves: Sequence[Chart]
    seed_curves: Sequence[Chart]
    positions: Positions
    logarithmic: bool
    seeds: Table
    settings: Table
    speed: Table
    accuracies: Sequence[Table] = ()
    classes: "Sequence[RunClasses]" = ()
    class_faults: Sequence[str] = ()

    @property
    def charts(self) -> list[Chart]:
        """All that the scripts draw."""
        matrices = [run.matrix for run in self.classes if run.matrix is not None]
        return [*self.curves, *self.seed_curves, *matrices]


def check_libraries() -> None:
    """Raises `InputError` where what draws a page is not installed."""
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"report: {not_installed(str(error.name), 'report')}") from None


def render(page: Page) -> str:
    """The page as HTML, the same for the same runs. Raises: as `check_libraries`."""
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
    told = ("id", "data", "layout", "curve", "logarithmic")
    drawn = [{name: getattr(chart, name) for name in told} for chart in page.charts]
    figures = {"charts": drawn, "positions": page.positions}
    return environment.get_template("page.html").render(page=page, figures=figures, plotly=get_plotlyjs())
