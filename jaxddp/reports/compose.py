"""Writes a report, one HTML file with all styles, scripts and images, from the work directories of runs.

Values from a run, such as the names of its classes, are untrusted. The template escapes them, and the page's content
security policy forbids loading anything.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, counted, not_installed, on_screen, size
from jaxddp.core.user_code import describe_error
from jaxddp.recipe.file import RecipeFile
from jaxddp.reports import tables
from jaxddp.reports.charts import COLOURS, curves, run_positions, seed_curves
from jaxddp.training.events import Series, is_wide

if TYPE_CHECKING:
    from jaxddp.reports.classes import RunClasses, ValidationImages

    ImagesOf = Callable[[Path], ValidationImages]

_LIBRARIES = (("jinja2", "report"), ("plotly", "report"), ("sklearn", "features"))
"""The libraries of a report, and their extras. The last one is for the map of features."""


def write_report(
    directories: Sequence[Path], out: Path, which: str | None, data_path: str | None = None, *, features: bool = False
) -> str:
    """Write a page about the runs of some work directories, and return a summary for the user.

    Args:
        which: the checkpoint ("latest", "best" or a step) that classifies the validation data. None omits the classes,
            which needs no JAX.
        data_path: the location of the runs' data, if it is not the location in their configs.
        features: whether to add a map of the features of each run's validation images.

    Raises:
        InputError: a directory contains no run, a library is missing, or `out` cannot be written. A missing or damaged
            file of a run is no error: the page omits its content and lists the fault.
    """
    _check_libraries(features=features)
    if which is not None and which not in ("best", "latest") and not (which.isascii() and which.isdecimal()):
        raise InputError(f"--step {which}: give best, latest, or the step of a checkpoint")
    if features and which is None:
        raise InputError("--features: needs the checkpoint's network; leave --no-predictions out")
    if not directories:
        raise InputError("report: no run is given; give the work directory of at least one")
    runs, images_of = tables.read_runs(directories), None
    if which is not None:
        from jaxddp.reports.classes import predict_validation_images

        images_of = partial(predict_validation_images, which=which, data_path=data_path)
    return _write(runs, out, images_of, features=features)


def write_report_of_weights(file: RecipeFile, out: Path, *, features: bool = False) -> str:
    """Write a page about what the weights of a recipe predict for its validation data; see `write_report`.

    Raises: InputError.
    """
    from jaxddp.reports.classes import predict_with_weights

    _check_libraries(features=features)
    path, config = Path(str(file.config.model.weights or file.path)), file.config.flat()
    of_weights = tables.RunFiles(path, str(path), config, Series(*({} for _ in Series._fields)), {}, "weights")
    images = predict_with_weights(file)
    return _write([of_weights], out, lambda _: images, features=features)


def _check_libraries(*, features: bool) -> None:
    for library, extra in _LIBRARIES if features else _LIBRARIES[:-1]:
        if find_spec(library) is None:
            raise InputError(f"report: {not_installed(library, extra)}")


def _write(runs: Sequence[tables.RunFiles], out: Path, images_of: "ImagesOf | None", *, features: bool) -> str:
    if out.suffix != ".html":
        raise InputError(f"{out}: the report is an HTML page; give a name that ends in .html")
    files.create(out.parent)
    out, page = files.check_out(out), Page(runs)
    if images_of is not None:
        page.add_classes(runs, images_of, features=features)
    content = render(page).encode(errors="replace")
    files.replace(out, content)
    summary = f"{out}: {counted(len(runs), 'run')}, {size(len(content))}"
    return "\n".join(map(on_screen, [summary, *page.comparisons, *page.faults, *page.class_faults]))


class Page:
    """The content of a report about runs. A section without charts, rows and faults is omitted.

    Attributes:
        comparisons: sentences that compare the runs with published results and with each other.
        runs: a table with a row for each run.
        legend: the name and the colour of each run.
        faults: a line for each missing or damaged file of a run.
        settings: the settings that differ between runs, or the settings of a single run that are not the default.
        speed: a table of speed, memory and time.
        curves: charts of all logged metrics.
        is_wide: whether the y axis of the loss is logarithmic when the page opens.
        seed_charts, seed_table: the means and the spreads of runs that differ in their seed or fold alone.
        positions: the x values of the points of the charts, on each x axis.
        classes: the predictions of checkpoints for validation data.
        accuracies: tables of the accuracy of each class. Runs with the same classes share a table.
        class_faults: a line for each run without predictions, with the reason.
    """

    def __init__(self, runs: Sequence[tables.RunFiles]):
        by_seed, colours = _groups(runs)
        done = [group._replace(members=tuple(n for n in group.members if runs[n].is_done)) for group in by_seed]
        several = [group for group in done if len(group.members) > 1]
        self.title = runs[0].name if len(runs) == 1 else counted(len(runs), "run")
        self.comparisons = tables.comparisons(runs, done)
        self.runs = tables.run_table(runs, colours)
        self.legend = [tables.Cell(run.name, colour) for run, colour in zip(runs, colours, strict=True)]
        self.faults = [f"{run.name}: {fault}" for run in runs for fault in run.faults]
        self.settings = _settings(runs)
        self.speed = tables.speed_table(runs, colours)
        self.curves = curves(runs, colours)
        self.is_wide = is_wide(columns for run in runs for columns in run.series[1:])
        self.seed_charts, positions = seed_curves(runs, several)
        self.seed_table = tables.seed_table(runs, several)
        self.positions = run_positions(runs) | positions
        self.classes: list[RunClasses] = []
        self.accuracies, self.class_faults = list[tables.TextTable](), list[str]()

    def add_classes(self, runs: Sequence[tables.RunFiles], images_of: "ImagesOf", *, features: bool = False) -> None:
        """Add the predictions of each run's checkpoint for the validation data.

        Args:
            runs: those of the page.
            images_of: returns the predictions for a work directory.
            features: whether to add a map of the features of the validation images.
        """
        from jaxddp.reports.classes import accuracy_tables, feature_map, run_classes

        classes, faults = self.classes, self.class_faults
        for number, (run, entry) in enumerate(zip(runs, self.legend, strict=True)):
            with _faults_of(f"{run.name}: its classes are left out", faults):
                if run.config and not any(key.startswith("model.") for key in run.config):
                    raise InputError("the run came from Python, and its config does not name the network")
                images = images_of(run.directory)
                classes.append(run_classes(number, entry, images))
                if features:
                    with _faults_of(f"{run.name}: its features are left out", faults):
                        classes[-1] = classes[-1]._replace(features=feature_map(number, images))
        self.accuracies = accuracy_tables(classes)


def render(page: Page) -> str:
    """Return the page as HTML, with the same text for the same runs."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, **blocks)
    of_classes = [
        each for run in page.classes for each in (run.matrix, *run.reliability, run.features and run.features.chart)
    ]
    charts = [chart._asdict() for chart in (*page.curves, *page.seed_charts, *of_classes) if chart]
    figures = {"charts": charts, "positions": page.positions}
    return environment.get_template("page.html").render(page=page, figures=figures, plotly=get_plotlyjs())


@contextmanager
def _faults_of(what: str, faults: list[str]) -> Iterator[None]:
    """Append an error of the block to `faults`."""
    try:
        yield
    # An error of the recipe's code or of a device does not affect the other runs.
    except Exception as error:
        faults.append(f"{what}: {describe_error(error)}")


def _groups(runs: Sequence[tables.RunFiles]) -> tuple[list[tables.SeedGroup], list[str]]:
    """Return a group of the runs that differ in their seed or fold alone, for each recipe, and the colour of each run.

    The runs of a group share a colour. If there is only one group, or every group has one run, each run has its own.
    """
    members = tables.seed_groups(runs)
    names = tables.group_names(runs, members)
    share = 1 < len(members) < len(runs)
    places = {run: number if share else run for number, group in enumerate(members) for run in group}
    colours = [COLOURS[places[run] % len(COLOURS)] for run in range(len(runs))]
    return [tables.SeedGroup(name, colours[each[0]], each) for name, each in zip(names, members, strict=True)], colours


def _settings(runs: Sequence[tables.RunFiles]) -> tables.TextTable:
    titles = tuple(run.name for run in runs) if len(runs) > 1 else ("default", "this run")
    settings = tables.differences(runs) if len(runs) > 1 else tables.changes(runs[0])
    rows = [tuple(map(tables.Cell, (key, *values))) for key, values in settings.items()]
    return tables.TextTable(("setting", *titles), rows, texts=1 + len(titles))
