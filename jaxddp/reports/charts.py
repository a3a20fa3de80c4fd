"""Curves of several runs on common axes, as plotly.js draws them: plain dicts, whose x the page fills in."""

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.seeds import SeedGroup, mean_curve
from jaxddp.reports.text_tables import is_share
from jaxddp.training.listeners.metric_rows import Columns

# Okabe and Ito's, without black and yellow, which are not seen on dark or on white.
# https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

MOST_POINTS = 2000
"""Of a curve. Of more, the least and the most of each stretch are drawn, so that no peak is lost."""

_FIRST = ("loss", "top1")
_SPEED = ("images_per_second", "data_wait_fraction", "flops_utilization", "peak_memory")
_TITLES = {
    "loss": "loss",
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "top10": "top-10 accuracy",
    "learning_rate": "learning rate",
    "images_per_second": "images/s",
    "data_wait_fraction": "time spent waiting for data",
    "flops_utilization": "FLOP utilization",
    "peak_memory": "peak memory of a device",
    "loss_scale": "loss scale",
    "image_size": "side of the training images",
}
_PARTS = ("steps", "epochs", "validation", "averaged")
_STYLES: dict[str, dict[str, Any]] = {
    "steps": {"line": {"width": 1}, "opacity": 0.45},
    "steps alone": {"line": {"width": 1.5}},
    "epochs": {"line": {"width": 2, "dash": "dot"}, "marker": {"size": 4}},
    "validation": {"line": {"width": 2.5}, "marker": {"size": 6}},
    "averaged": {"line": {"width": 2.5, "dash": "dash"}, "marker": {"size": 6}},
}
_MOST_MARKED = 30
"""Of the points of a curve; more would hide it."""
_NAMES = {
    "steps": "a step",
    "epochs": "mean of an epoch",
    "validation": "validation",
    "averaged": "validation of the average",
}


class Chart(NamedTuple):
    """A figure of the page.

    Attributes:
        title: plain text.
        data, layout: as plotly.js takes them, text escaped. Where `meta` names positions, the page adds x.
        main: whether it is one of the first, drawn large.
        curve: whether its x axis is that which the reader chooses.
        logarithmic: whether its y axis is, if the reader chooses so.
    """

    id: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    main: bool = False
    curve: bool = True
    logarithmic: bool = False


Positions = dict[str, dict[str, list[float | None]]]
"""By the name in a trace's `meta`: where its points lie on the axes "step", "epoch" and "time" (seconds)."""


def parts_of(run: RunFiles) -> dict[str, Columns]:
    """The rows of a run by how they are drawn."""
    return dict(zip(_PARTS, run.series, strict=True))


def run_positions(runs: Sequence[RunFiles]) -> Positions:
    """Where the rows of the runs lie."""
    return {
        f"{number} {part}": {axis: numbers(places) for axis, places in run.positions(columns).items()}
        for number, run in enumerate(runs)
        for part, columns in parts_of(run).items()
        if columns
    }


def curves(runs: Sequence[RunFiles], colours: Sequence[str]) -> list[Chart]:
    """A chart for each metric that any run has, the runs on common axes."""
    known = dict.fromkeys(name for run in runs for columns in run.series for name in columns)
    names = [name for name in known if name not in ("step", "epoch", "count", "seconds")]
    others = [name for name in names if name not in (*_FIRST, *_SPEED)]
    ordered = [name for name in (*_FIRST, *others, *_SPEED) if name in names]
    charts = [_curve(place, metric, runs, colours) for place, metric in enumerate(ordered)]
    return [chart for chart in charts if chart.data]


def is_wide(runs: Sequence[RunFiles]) -> bool:
    """Whether the losses, of epochs and of validation, span more than a factor of 100: then a line shows little."""
    known = [columns["loss"] for run in runs for columns in run.series[1:] if "loss" in columns]
    losses = np.concatenate([*known, np.ones(0)])
    losses = losses[losses > 0]
    return bool(losses.size and losses.max() > 100 * losses.min())


def seed_curves(runs: Sequence[RunFiles], groups: Sequence[SeedGroup]) -> tuple[list[Chart], Positions]:
    """The mean over seeds of what validation measured, with a band from the least to the most.

    Where their points lie comes with the charts.
    """
    charts, positions = [], Positions()
    for metric in dict.fromkeys(metric for run in runs for metric in run.metrics):
        data = []
        for number, group in enumerate(groups):
            curve = mean_curve([runs[member] for member in group.members], metric)
            if curve is None:
                continue
            where = f"seeds {number}"
            positions[where] = {axis: numbers(places) for axis, places in curve.positions.items()}
            shown = f"{group.name}, mean of {len(group.members)}"
            data += _band(curve.least, curve.most, group.colour, where)
            data.append(_trace(shown, curve.mean, where, group.colour, "validation", metric))
        if data:
            title = f"{_TITLES.get(metric, metric)} of validation"
            charts.append(_chart(f"seeds-{len(charts)}", title, metric, data))
    return charts, positions


def numbers(values: np.ndarray) -> list[float | None]:
    """Of seven digits, which no screen tells from more; None where a value is not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def plain(text: str) -> str:
    """A text in which plotly finds no markup."""
    return html.escape(text)


def _curve(place: int, metric: str, runs: Sequence[RunFiles], colours: Sequence[str]) -> Chart:
    data = []
    for number, run in enumerate(runs):
        for part, columns in parts_of(run).items():
            if metric not in columns or not np.isfinite(columns[metric]).any():
                continue
            name = f"{run.name}, {_NAMES[part]}"
            style = "steps alone" if part == "steps" and metric not in run.series.epochs else part
            trace = _trace(name, columns[metric], f"{number} {part}", colours[number], style, metric)
            trace["meta"]["run"] = number
            data.append(trace)
    return _chart(f"curve-{place}", _TITLES.get(metric, metric), metric, data)


def _chart(name: str, title: str, metric: str, data: list[dict[str, Any]]) -> Chart:
    return Chart(name, title, data, _layout(metric), main=metric in _FIRST, logarithmic=metric == "loss")


def _trace(name: str, values: np.ndarray, where: str, colour: str, style: str, metric: str) -> dict[str, Any]:
    drawn, rows, known = _STYLES[style], _drawn_rows(values), np.isfinite(values).sum()
    # One point alone is no line.
    marked = known == 1 or ("marker" in drawn and known <= _MOST_MARKED)
    meta: dict[str, Any] = {"where": where}
    if len(rows) < len(values):
        meta["rows"] = rows.tolist()
    shown = "%{y:.2%}" if is_share(metric) else "%{y:.5g}"
    return {
        "type": "scatter",
        "name": plain(name),
        "y": numbers(values[rows]),
        "mode": "lines+markers" if marked else "lines",
        **drawn,
        "line": drawn["line"] | {"color": colour},
        "meta": meta,
        "hovertemplate": f"%{{x}}: {shown}",
    }


def _band(least: np.ndarray, most: np.ndarray, colour: str, where: str) -> list[dict[str, Any]]:
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": {"where": where}}
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
    return [edge | {"y": numbers(least)}, edge | {"y": numbers(most)} | fill]


def _drawn_rows(values: np.ndarray) -> np.ndarray:
    """Which of the values are drawn: all, or the least and the most of each stretch, and its first where none is."""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), MOST_POINTS // 2 + 1).astype(int)
    rows = set[int]()
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        stretch = values[begin:end]
        known = np.isfinite(stretch).any()
        rows |= {begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))} if known else {begin}
    return np.array(sorted(rows))


def _layout(metric: str) -> dict[str, Any]:
    axis: dict[str, Any] = {}
    if is_share(metric):
        axis["tickformat"] = ".0%"
    elif metric == "peak_memory":
        axis |= {"tickformat": ".3~s", "ticksuffix": "B"}
    if metric in (*_SPEED, "learning_rate", "loss_scale"):
        axis["rangemode"] = "tozero"
    return {"yaxis": axis}
