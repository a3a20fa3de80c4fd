"""Pictures of a run: curves over epochs and grids of images, drawn with matplotlib but without pyplot."""

import gc
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jaxddp.training.events import NOT_MEASURED, Columns, PredictedImages, Series, is_wide, to_drawable
from jaxddp.training.progress import COLOURS

TRAIN, VAL, INK, GRID = COLOURS["train"], COLOURS["val"], "#404040", "#E4E4E4"

SMALL = [("learning_rate", "learning rate"), ("images_per_second", "images/s"), ("data_wait_fraction", "data wait")]
"""The metrics of the small panels. A metric without values is left out, such as an unknown learning rate."""


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(picture: Figure) -> bytes:
    """Return the picture as PNG; equal curves give equal bytes."""
    file = io.BytesIO()
    picture.savefig(file, format="png", dpi=144, metadata={"Software": None})
    return file.getvalue()


def draw_and_free(draw: Callable[[], Any]) -> Any:
    """Call a function that draws a figure, return its result, and free the figure's memory.

    The parts of a figure refer to each other, so only a garbage collection frees their several MB. With the many
    objects of JAX, a full collection is rare, and takes half a second. A collection of the objects made
    since the start of the figure takes a hundredth of a second.
    """
    # A collection while drawing could move parts of the figure to an older generation, which gc.collect(0) ignores.
    collects = gc.isenabled()
    gc.disable()
    try:
        return draw()
    finally:
        gc.collect(0)
        if collects:
            gc.enable()


def figure(series: Series) -> Picture:
    """Return the curves of loss and top-1 in training (thin: logged steps, bold: epochs) and validation.

    Below each panel is a small panel with one metric of `SMALL`. The axis of the loss is logarithmic if the losses
    of epochs and validations span more than a factor of 100. Without top-1, the second panel shows the first other
    metric of the validations.
    """
    others = [name for name in series.val if name not in ("loss", *NOT_MEASURED)]
    measures = ["loss", *(["top1"] if any("top1" in columns for columns in series) else others[:1])]
    picture = Picture(figsize=(5.5 * len(measures), 5), layout="constrained", facecolor="white")
    layout: Any = picture.get_layout_engine()
    layout.set(w_pad=0.12, h_pad=0.1, hspace=0.02)
    panels = picture.subplots(2, len(measures), sharex="col", height_ratios=(4, 1), squeeze=False)
    small = [(name, title) for name, title in SMALL if name in series.train] or SMALL
    for (upper, lower), measure, (name, title) in zip(panels.T, measures, small, strict=False):
        _measure_panel(upper, series, measure)
        upper.set_xlim(left=0)
        _style(lower, title, "epoch")
        _line(lower, series.train, name, INK, linewidth=1.2)
        peak = float(np.nanmax(series.train.get(name, np.zeros(0)), initial=0))
        lower.set_ylim(0, 1.1 * peak or 1)
        lower.set_yticks([0, peak], ["0", f"{peak:,.0f}" if peak >= 100 else f"{peak:.3g}"])
    return picture


def _measure_panel(axes: Axes, series: Series, name: str) -> None:
    percent = name == "top1"
    _style(axes, "top-1 accuracy" if percent else name)
    thin = {"linewidth": 0.8, "alpha": 0.4} if name in series.epochs else {"linewidth": 1.8}
    steps = _line(axes, series.train, name, TRAIN, **thin)
    lines = {"train": series.epochs, "val": series.val, "val_ema": series.val_ema}
    last = {label: _line(axes, part, name, COLOURS[label], linewidth=1.8) for label, part in lines.items()}
    last["train"] = last["train"] or steps
    if not any(last.values()):
        axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, color=INK, ha="center")
    elif percent:
        axes.set_ylim(*np.clip(axes.get_ylim(), -0.004, 1.009))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif is_wide(series[1:]):
        axes.set_yscale("log")
    _label_ends(axes, {label: end for label, end in last.items() if end}, "{:.1%}" if percent else "{:.4g}")


def _style(axes: Axes, title: str, x: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _line(axes: Axes, columns: Columns, name: str, colour: str, **style: Any) -> tuple[float, float] | None:
    """Draw a metric over epochs, and return its last point. A line of few points has a marker at each point."""
    x, y = (columns.get(key, np.zeros(0)) for key in ("epoch", name))
    finite = np.isfinite(y)
    if not finite.any():
        return None
    has_markers = finite.sum() == 1 or (finite.sum() <= 30 and style["linewidth"] > 1.5)
    axes.plot(x, y, color=colour, marker="o" if has_markers else "", markersize=4, solid_joinstyle="round", **style)
    return float(x[finite][-1]), float(y[finite][-1])


def _label_ends(axes: Axes, ends: dict[str, tuple[float, float]], number: str) -> None:
    """Write the name and last value of each line at the panel's right edge, in the line's colour, without overlaps."""
    axes.get_ylim()  # makes matplotlib set the limits
    to_panel = axes.transScale + axes.transLimits
    labels, offsets = sorted(ends, key=lambda label: ends[label][1]), 0.06 * np.arange(len(ends))
    heights = [float(to_panel.transform(ends[label])[1]) for label in labels]
    heights = np.minimum(np.maximum.accumulate(heights - offsets), 1 - offsets[-1:]) + offsets
    for label, height in zip(labels, heights.tolist(), strict=True):
        text = f"{label} {number.format(ends[label][1])}"
        axes.text(1.01, height, text, transform=axes.transAxes, color=COLOURS[label], fontsize=10, va="center")


def rate_figure(rates: np.ndarray, losses: Sequence[float], smoothed: np.ndarray, chosen: float | None) -> Picture:
    """Return the losses of a range test over the learning rate (thin: steps, bold: smoothed), with the chosen rate.

    Losses above twice the first loss lie outside the picture.
    """
    picture = Picture(figsize=(7, 4.5), layout="constrained", facecolor="white")
    axes = picture.add_subplot()
    _style(axes, "loss", "learning rate")
    axes.set_xscale("log")
    axes.plot(rates, losses, color=TRAIN, linewidth=0.8, alpha=0.4)
    axes.plot(rates, smoothed, color=TRAIN, linewidth=1.8, solid_joinstyle="round")
    if visible := [loss for loss in (*losses, *smoothed) if loss <= 2 * losses[0]]:
        margin = 0.05 * (max(visible) - min(visible)) or 1
        axes.set_ylim(min(visible) - margin, max(visible) + margin)
    if chosen is not None:
        axes.axvline(chosen, color=VAL, linewidth=1.2)
        place = {"transform": axes.get_xaxis_transform(), "color": VAL, "va": "top", "fontsize": 10}
        axes.text(chosen, 0.98, f" {chosen:.2g}", **place)
    return picture


def prediction_grid(predictions: PredictedImages) -> Picture:
    """Return a grid of images with predicted classes. A wrong prediction has a coloured caption with the true class."""
    images: Any = predictions.images
    if predictions.heat_maps is not None:
        images = [heat_map_over(image, heat) for image, heat in zip(images, predictions.heat_maps, strict=True)]
    return _grid(images, predictions.captions, [VAL if wrong else INK for wrong in predictions.wrong], 6, fontsize=9)


def heat_map_over(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return a heat map, float[H, W], over an image, uint8 or uint16 [H, W, C], as uint8[H, W, 3].

    The colours range from dark (0) to bright (the maximum of the map). A map without a positive value is dark.
    """
    drawable = to_drawable(image).astype(np.float32)
    # The weights of red, green and blue are those of ITU-R BT.601.
    gray = drawable if drawable.ndim == 2 else drawable[..., :3] @ np.array([0.299, 0.587, 0.114], np.float32)
    shares = np.clip(np.nan_to_num(heat) / (np.nanmax(heat, initial=0) or 1), 0, 1)
    return np.rint((colormaps["inferno"](shares)[..., :3] * 255 + gray[..., None]) / 2).astype(np.uint8)


def prediction_pixels(predictions: PredictedImages) -> np.ndarray:
    """Return the picture of `prediction_grid` as pixels, uint8 [H, W, 4]."""

    def pixels() -> np.ndarray:
        canvas = FigureCanvasAgg(prediction_grid(predictions))
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())

    return draw_and_free(pixels)


def input_grid(images: np.ndarray, titles: Sequence[str]) -> Picture:
    """Return a grid of images, uint8 or uint16 [N, H, W, C], with their titles."""
    return _grid(images, titles, [INK] * len(titles), columns=8, fontsize=7)


def _grid(images: Any, titles: Sequence[str], colours: Sequence[str], columns: int, fontsize: int) -> Picture:
    """Return a grid of images with at most `columns` in a row; the last row may have empty cells."""
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    picture = Picture(figsize=(1.9 * columns, 2.3 * rows), layout="constrained", facecolor="white")
    cells = picture.subplots(rows, columns, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    for cell, image, title, colour in zip(cells, images, titles, colours, strict=False):
        cell.imshow(to_drawable(image), cmap="gray", vmin=0, vmax=255)
        cell.set_title(title, fontsize=fontsize, color=colour, parse_math=False)  # A class may be named $1_$2.
    return picture
