"""Writes a report: reads work directories, composes the page, and writes the file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.wording import counted, first_line, size
from jaxddp.reports.charts import COLOURS, curves, is_wide, run_positions, seed_curves
from jaxddp.reports.differences import changes, differences, group_names, seed_groups
from jaxddp.reports.feature_map import check_feature_map, feature_map
from jaxddp.reports.overview import run_table, speed_table
from jaxddp.reports.page import ClassSection, CurveSection, LegendEntry, Page, SeedSection, check_libraries, render
from jaxddp.reports.read_runs import read_runs
from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.seeds import SeedGroup, seed_table
from jaxddp.reports.text_tables import Cell, Column, TextTable


def write_report(
    directories: Sequence[Path],
    out: Path,
    which: str | None,
    data_path: str | None = None,
    *,
    features: bool = False,
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
    check_libraries()
    if which is not None and which not in ("best", "latest") and not (which.isascii() and which.isdecimal()):
        raise InputError(f"--step {which}: give best, latest, or the step of a checkpoint")
    if features:
        check_feature_map()
    if features and which is None:
        raise InputError("--features: needs the checkpoint's network; leave --no-predictions out")
    if not directories:
        raise InputError("report: no run is given; give the work directory of at least one")
    runs = read_runs(directories)
    if out.suffix != ".html":
        raise InputError(f"{out}: the report is an HTML page; give a name that ends in .html")
    files.create(out.parent)
    out = files.check_out(out)
    page = page_of(runs)
    if which is not None:
        page = with_classes(page, runs, which, data_path, features=features)
    content = render(page).encode(errors="replace")
    files.replace(out, content)
    left_out = [*page.faults, *page.classes.faults]
    more = "".join(f"\n{fault}" for fault in left_out)
    return f"{out}: {counted(len(runs), 'run')}, {size(len(content))}{more}"


def page_of(runs: Sequence[RunFiles]) -> Page:
    """Return the page of some runs without the predictions of their checkpoints."""
    groups, colours = _groups(runs)
    done = [group._replace(members=tuple(n for n in group.members if runs[n].is_done)) for group in groups]
    several = [group for group in done if len(group.members) > 1]
    return Page(
        title=runs[0].name if len(runs) == 1 else counted(len(runs), "run"),
        runs=run_table(runs, colours),
        legend=[LegendEntry(run.name, colour) for run, colour in zip(runs, colours, strict=True)],
        faults=[f"{run.name}: {fault}" for run in runs for fault in run.faults],
        curves=CurveSection(curves(runs, colours), run_positions(runs), is_wide(runs)),
        seeds=SeedSection(*seed_curves(runs, several), seed_table(runs, several)),
        settings=_settings(runs, colours),
        speed=speed_table(runs, colours),
    )


def with_classes(
    page: Page, runs: Sequence[RunFiles], which: str, data_path: str | None = None, *, features: bool = False
) -> Page:
    """Return a copy of the page with the predictions of each run's checkpoint for the validation data.

    Args:
        features: whether to add a map of the features of the validation images.
    """
    from jaxddp.reports.classes import accuracy_tables, run_classes
    from jaxddp.reports.validation_images import predict_validation_images

    classes, faults = [], []
    for number, (run, entry) in enumerate(zip(runs, page.legend, strict=True)):
        with _faults_of(f"{run.name}: its classes are left out", faults):
            if run.config and "model" not in run.config:
                raise InputError("the run came from Python, and its config does not name the network")
            images = predict_validation_images(run.directory, which, data_path)
            classes.append(run_classes(number, *entry, images))
            if features:
                with _faults_of(f"{run.name}: its features are left out", faults):
                    classes[-1] = classes[-1]._replace(features=feature_map(number, images))
    return replace(page, classes=ClassSection(accuracy_tables(classes), classes, faults))


@contextmanager
def _faults_of(what: str, faults: list[str]) -> Iterator[None]:
    """Append an error of the block to `faults`."""
    try:
        yield
    except JaxddpError as error:
        faults.append(f"{what}: {error}")
    # An error of the recipe's code or of a device does not affect the other runs.
    except Exception as error:
        faults.append(f"{what}: {type(error).__name__}: {first_line(error)}")


def _groups(runs: Sequence[RunFiles]) -> tuple[list[SeedGroup], list[str]]:
    """Return the groups of runs that differ in their seed alone, and the colour of each run.

    The runs of a group share a colour. If there is only one group, or every group has one run, each run has its own.
    """
    members = seed_groups(runs)
    names = group_names(runs, members)
    by_group = 1 < len(members) < len(runs)
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
    for number, group in enumerate(members if by_group else []):
        for run in group:
            colours[run] = COLOURS[number % len(COLOURS)]
    return [SeedGroup(name, colours[group[0]], group) for name, group in zip(names, members, strict=True)], colours


def _settings(runs: Sequence[RunFiles], colours: Sequence[str]) -> TextTable:
    if len(runs) == 1:
        rows, titles = changes(runs[0]), ("default", "this run")
    else:
        rows, titles = differences(runs), tuple(run.name for run in runs)
    columns = (Column("setting", number=False), *(Column(title, number=False) for title in titles))
    return TextTable(columns, [(Cell(row.key), *map(Cell, row.values)) for row in rows])
