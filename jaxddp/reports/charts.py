"""Charts of several runs on common axes, as dicts for plotly.js. The script of the page adds the x values."""

import html
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxddp.reports.tables import NOT_MEASURED, RunFiles, SeedGroup, is_share, mean_curve

# The palette of Okabe and Ito, without black and yellow, which are invisible on a dark or a white page
# (https://jfly.uni-koeln.de/color/), and six colours that differ from them as much, also in red-green blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS += ("#5511FF", "#DD0044", "#CCAA66", "#555566", "#446633", "#5566EE")

MOST_POINTS = 2000
"""The maximum number of points of a curve that is drawn in full. A longer curve is cut into short stretches, and only
the extremes of each stretch are drawn."""

_FIRST = ("loss", "top1")
_SPEED = ("images_per_second", "data_wait_fraction", "flops_utilization", "peak_memory")
_TITLES = {f"top{k}": f"top-{k} accuracy" for k in (1, 5, 10)}
_TITLES |= {"learning_rate": "learning rate", "images_per_second": "images/s", "loss_scale": "loss scale"}
_TITLES |= {"data_wait_fraction": "time spent waiting for data", "flops_utilization": "FLOP utilization"}
_TITLES |= {"peak_memory": "peak memory of a device", "image_size": "side of the training images"}
Plotly = dict[str, Any]
"""A trace of plotly.js, or a part of one."""
_PARTS: dict[str, tuple[str, Plotly]] = {
    "steps": ("step", {"line": {"width": 1}, "opacity": 0.45}),
    "epochs": ("mean of an epoch", {"line": {"width": 2, "dash": "dot"}, "marker": {"size": 4}}),
    "validation": ("validation", {"line": {"width": 2.5}, "marker": {"size": 6}}),
    "averaged": ("validation of averaged parameters", {"line": {"width": 2.5, "dash": "dash"}, "marker": {"size": 6}}),
}
"""The name and the style of each part of a run's `Series`, in the order of its fields."""


class Chart(NamedTuple):
    """A figure of the page.

    Attributes:
        title: plain text.
        data, layout: the arguments of plotly.js, with escaped text. If the `meta` of a trace names an entry of
            `Positions`, the page adds its x values.
        main: whether the chart is large and comes before the other charts.
        curve: whether the reader chooses the x axis.
        logarithmic: whether the reader can choose a logarithmic y axis.
    """

    id: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    main: bool = False
    curve: bool = True
    logarithmic: bool = False


Positions = dict[str, dict[str, list[float | None]]]
"""The x values of traces, by the name in a trace's `meta`, on the axes "step", "epoch" and "time" (seconds)."""


def run_positions(runs: Sequence[RunFiles]) -> Positions:
    """Return the x values of all rows of the runs."""
    return {
        f"{number} {part}": {axis: numbers(values) for axis, values in run.positions(columns).items()}
        for number, run in enumerate(runs)
        for part, columns in zip(_PARTS, run.series, strict=True)
        if columns
    }


def curves(runs: Sequence[RunFiles], colours: Sequence[str]) -> list[Chart]:
    """Return a chart for each metric of any run, with all runs on common axes."""
    logged = dict.fromkeys(name for run in runs for columns in run.series for name in columns)
    names = [name for name in logged if name not in (*NOT_MEASURED, *_FIRST, *_SPEED)]
    ordered = [name for name in (*_FIRST, *names, *_SPEED) if name in logged]
    charts = [_curve(number, metric, runs, colours) for number, metric in enumerate(ordered)]
    return [chart for chart in charts if chart.data]


def seed_curves(runs: Sequence[RunFiles], of_seeds: Sequence[SeedGroup]) -> tuple[list[Chart], Positions]:
    """Return a chart of each validation metric, and the x values of the charts' points.

    A chart shows the mean over seeds, and a band from the minimum to the maximum.
    """
    charts, positions = [], Positions()
    for metric in dict.fromkeys(metric for run in runs for metric in run.metrics):
        data = []
        for number, group in enumerate(of_seeds):
            if curve := mean_curve([runs[member] for member in group.members], metric):
                key, label = f"seeds {number} {metric}", f"{group.name}, mean of {len(group.members)}"
                positions[key] = {axis: numbers(values) for axis, values in curve.positions.items()}
                data += _band(curve.least, curve.most, group.colour, key)
                data.append(_trace(label, curve.mean, {"where": key}, group.colour, _PARTS["validation"][1], metric))
        if data:
            charts.append(_chart(f"seeds-{len(charts)}", metric, data, runs, " of validation"))
    return charts, positions


def numbers(values: np.ndarray) -> list[float | None]:
    """Return values rounded to seven digits, and None instead of a value that is not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def _curve(index: int, metric: str, runs: Sequence[RunFiles], colours: Sequence[str]) -> Chart:
    data = []
    for number, run in enumerate(runs):
        for (part, (name, style)), columns in zip(_PARTS.items(), run.series, strict=True):
            if metric in columns and np.isfinite(columns[metric]).any():
                if part == "steps" and metric not in run.series.epochs:
                    style = {"line": {"width": 1.5}}
                where = {"where": f"{number} {part}", "run": number}
                data.append(_trace(f"{run.name}, {name}", columns[metric], where, colours[number], style, metric))
    return _chart(f"curve-{index}", metric, data, runs)


def _published(runs: Sequence[RunFiles], metric: str) -> Plotly:
    """Return the parts of a layout that draw published results: a line, or a band of two deviations on both sides."""
    shapes, notes, across = [], [], {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "layer": "below"}
    for each in dict.fromkeys(run.reference for run in runs if run.reference and run.reference.metric == metric):
        spread, style = 2 * (each.deviation or 0), {"line": {"color": "gray", "dash": "dash"}, "fillcolor": "gray"}
        shapes.append(across | style | {"y0": each.value - spread, "y1": each.value + spread, "opacity": 0.4})
        note = {"xref": "paper", "x": 0, "xanchor": "left", "y": each.value + spread, "yanchor": "bottom"}
        text = f"published {each}{'' if each.deviation else ', spread unknown'}"
        notes.append(note | {"text": html.escape(text, quote=False), "showarrow": False})
    return {"shapes": shapes, "annotations": notes}


def _chart(name: str, metric: str, data: list[Plotly], runs: Sequence[RunFiles], note: str = "") -> Chart:
    # Shares without trailing zeros: 20%, 0.5%.
    axis = {"tickformat": ".4~%"} if is_share(metric) else {}
    # Without limits, the axis of equal shares of 100% ends at 200%.
    if axis and all(0 <= y <= 1 for trace in data for y in trace["y"] if y is not None):
        axis |= {"minallowed": -0.02, "maxallowed": 1.02}
    axis |= {"tickformat": ".3~s", "ticksuffix": "B"} if metric == "peak_memory" else {}
    axis |= {"rangemode": "tozero"} if metric in (*_SPEED, "learning_rate", "loss_scale") else {}
    title = _TITLES.get(metric, metric) + note
    layout = {"yaxis": axis} | _published(runs, metric.rpartition(" ")[2])
    return Chart(name, title, data, layout, main=metric in _FIRST, logarithmic=metric == "loss")


def _trace(name: str, values: np.ndarray, meta: Plotly, colour: str, style: Plotly, metric: str) -> Plotly:
    rows, finite = _drawn_rows(values), np.isfinite(values).sum()
    # A line with a single point is invisible. More than 30 markers would hide the curve.
    has_markers = finite == 1 or ("marker" in style and finite <= 30)
    mode, value = "lines+markers" if has_markers else "lines", "%{y:.2%}" if is_share(metric) else "%{y:.5g}"
    meta |= {"rows": rows.tolist()} if len(rows) < len(values) else {}
    trace = {"type": "scatter", "name": html.escape(name, quote=False), "mode": mode}
    trace |= {"hovertemplate": f"%{{x}}: {value}"}
    return {**trace, **style, "line": style["line"] | {"color": colour}, "y": numbers(values[rows]), "meta": meta}


def _band(least: np.ndarray, most: np.ndarray, colour: str, key: str) -> list[dict[str, Any]]:
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": {"where": key}}
    return [edge | {"y": numbers(least)}, edge | {"y": numbers(most), "fill": "tonexty", "fillcolor": f"{colour}33"}]


def _drawn_rows(values: np.ndarray) -> np.ndarray:
    """Return the rows to draw: all rows, or the rows of the minimum and the maximum of each stretch.

    If a stretch has no finite value, its first row is drawn.
    """
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    edges, rows = np.linspace(0, len(values), MOST_POINTS // 2 + 1).astype(int).tolist(), set[int]()
    for begin, end in itertools.pairwise(edges):
        stretch = values[begin:end]
        finite = np.isfinite(stretch).any()
        rows |= {begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))} if finite else {begin}
    return np.array(sorted(rows))
