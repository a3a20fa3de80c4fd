"""What a checkpoint predicts for the validation images of its run: by class, its surest mistakes, a map of features.

The points of the map are computed by t-SNE (van der Maaten and Hinton 2008, "Visualizing data using t-SNE", JMLR 9) or
UMAP (McInnes et al. 2018, arXiv:1802.03426).
"""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image

import jaxddp.inference.pretrained as pretrained
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, counted
from jaxddp.data.opening import chosen_images
from jaxddp.data.order import permutation
from jaxddp.data.source import Source, Table
from jaxddp.engine.compilation import keep_compiled_programs
from jaxddp.inference.calibrated import calibrated, open_validation_of
from jaxddp.inference.predictions import Outcome
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import Topology
from jaxddp.recipe.file import RecipeFile
from jaxddp.reports.charts import COLOURS, Chart, numbers
from jaxddp.reports.tables import NOTHING, Cell, TextTable
from jaxddp.training.events import short_class_name, to_drawable

MOST_MISTAKES, MOST_CONFUSIONS, _MOST_IN_SIGHT = 24, 20, 10
"""The maximum number of mistakes, of confusions, and of confusions in a table that does not scroll."""
LARGEST_MATRIX, _WITH_COUNTS, _MOST_NAMED = 100, 20, 20
"""The maximum number of classes of a confusion matrix (with more, no matrix is drawn), of a matrix with counts in its
cells, and of a legend (more would not fit)."""
MOST_IMAGES, _LEAST_IMAGES = 2000, 5
"""The number of points of a map. t-SNE of 2,000 points with 512 features takes 5 s of CPU time."""
_PERPLEXITY, _NEIGHBOURS, _SEED = 30, 15, 0
_LONGEST_SIDE = 128
_NO_AXIS: dict[str, Any] = {"showticklabels": False, "ticks": "", "zeroline": False, "showgrid": False}


class ValidationImages(NamedTuple):
    """Images, the config for reading them, the predictions of a checkpoint for them, and the network itself."""

    outcome: Outcome
    source: Table
    data: DataConfig
    run: TrainedRun


def predict_validation_images(directory: Path, which: str, data_path: str | None = None) -> ValidationImages:
    """Return the predictions of a checkpoint for the run's validation data, on all devices of this machine.

    The probabilities of an image that cannot be used are NaN.

    Args:
        which: "latest", "best" or a step; without validations "best" is the latest.
        data_path: other data, or another place of the run's data; see `open_evaluated`.

    Raises:
        InputError: the run's config does not name its network, the data or the checkpoint cannot be read, or the data
            have other classes than the run.
    """
    keep_compiled_programs()
    run = calibrated(restore_run(directory, which, Topology.create()))
    config = run.config if data_path is None else run.config.replace(data={"path": data_path, "name": None})
    # Of the run's own data, the same images as in its validations, in the same order.
    source = open_validation_of(run, config)
    return ValidationImages(run.outcome(source), source, run.data_of(source), run)


def predict_with_weights(file: RecipeFile) -> ValidationImages:
    """Return the predictions of the weights of a recipe for its validation data. Raises: see `open_measured`."""
    network, source = pretrained.open_measured(file)
    return ValidationImages(network.outcome(source), cast(Table, source), network.data_of(source), network)


def thumbnails(source: Source, data: DataConfig, rows: np.ndarray) -> list[str]:
    """Return images as `data:` URLs of PNG files of at most 128x128 pixels. Raises: see `eval_batches`."""
    urls = []
    for image in chosen_images(source, data, rows) if len(rows) else ():
        picture, file = Image.fromarray(to_drawable(image)), io.BytesIO()
        picture.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
        picture.save(file, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    return urls


class FeatureMap(NamedTuple):
    """A chart with a point for each image, and a line about how it was made."""

    chart: Chart
    note: str


class Mistake(NamedTuple):
    """A misclassified image: its `data:` URL, its name, both classes, and the probability of the wrong class."""

    url: str
    name: str
    label: str
    prediction: str
    probability: str


class RunClasses(NamedTuple):
    """The predictions of a run for each class of the validation data.

    Attributes:
        reliability: the charts of `reliability_charts`.
        counts: the number of images of each class, int64[K].
        accuracies: the accuracy of each class, float64[K]; NaN for a class without images.
        features: a map of the features of the images; None without features.
    """

    name: str
    colour: str
    summary: str
    matrix: Chart | None
    reliability: list[Chart]
    confusions: TextTable
    mistakes: list[Mistake]
    class_names: tuple[str, ...]
    counts: np.ndarray
    accuracies: np.ndarray
    features: FeatureMap | None = None


def run_classes(number: int, run: Cell, images: ValidationImages) -> RunClasses:
    """Return the confusion matrix, the most frequent confusions and the most confident mistakes of a run.

    Args:
        number: the number of the run in the report.
        run: its name and its colour.
    """
    outcome, source, data, _ = images
    names, rows = outcome.class_names, outcome.surest_mistakes(MOST_MISTAKES)
    unusable = len(outcome.labels) - len(outcome.known)
    summary = f"step {outcome.step:,}: {outcome.accuracy:.2%} of {counted(len(outcome.known), 'image')} right"
    summary += f", {unusable:,} cannot be used" if unusable else ""
    matrix = _matrix(f"matrix-{number}", outcome) if len(names) <= LARGEST_MATRIX else None
    confusions = [
        tuple(map(Cell, (names[label], names[prediction], f"{count:,}", f"{share:.1%}")))
        for label, prediction, count, share in outcome.confusions(MOST_CONFUSIONS)
    ]
    titles = ("class", "taken for", "images", "of the class")
    table = TextTable(titles, confusions, texts=2, tall=len(confusions) > _MOST_IN_SIGHT)
    shown = zip(thumbnails(source, data, rows), rows.tolist(), outcome.probability(rows).tolist(), strict=True)
    mistakes = [
        Mistake(url, source.name(row), names[outcome.labels[row]], names[outcome.predictions[row]], f"{share:.1%}")
        for url, row, share in shown
    ]
    reliability = reliability_charts(number, outcome)
    of_classes = outcome.class_counts, outcome.class_accuracy
    return RunClasses(run.text, run.colour, summary, matrix, reliability, table, mistakes, names, *of_classes)


def accuracy_tables(runs: Sequence[RunClasses]) -> list[TextTable]:
    """Return tables with the accuracy of each class in each run, the worst class first.

    Runs with the same classes, and with the same number of images in each class, are in one table.
    """
    alike: dict[tuple[object, ...], list[RunClasses]] = {}
    for run in runs:
        alike.setdefault((run.class_names, *run.counts.tolist()), []).append(run)
    return [_accuracies(members) for members in alike.values()]


def _accuracies(runs: Sequence[RunClasses]) -> TextTable:
    first, accuracies = runs[0], np.stack([run.accuracies for run in runs])
    rows = []
    # Classes without images come last.
    for label in np.argsort(accuracies.mean(0), kind="stable").tolist():
        shares = zip(accuracies[:, label].tolist(), (run.colour for run in runs), strict=True)
        cells = [Cell(NOTHING) if np.isnan(share) else Cell(f"{share:.1%}", colour, share) for share, colour in shares]
        rows.append((Cell(first.class_names[label]), Cell(f"{first.counts[label]:,}"), *cells))
    return TextTable(("class", "images", *(run.name for run in runs)), rows, tall=True)


def _matrix(chart: str, outcome: Outcome) -> Chart:
    counts, names = outcome.confusion, [html.escape(name, quote=False) for name in outcome.class_names]
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)

    def hover(label: int, guess: int) -> str:
        result = "recognized" if label == guess else f"taken for {names[guess]}"
        count = f"{counts[label, guess]:,} of {totals[label, 0]:,} ({shares[label, guess]:.1%})"
        return f"{names[label]} {result}:<br>{count}" if counts[label, guess] else ""

    classes = range(len(names))
    heatmap: dict[str, Any] = {"type": "heatmap", "z": [[round(share, 4) for share in row] for row in shares.tolist()]}
    heatmap |= {"hoverinfo": "text", "showscale": False, "zmin": 0, "zmax": 1, "xgap": 1, "ygap": 1}
    heatmap["hovertext"] = [[hover(label, guess) for guess in classes] for label in classes]
    # The labels of many classes would overlap. The names are in the text under the pointer.
    axis = _NO_AXIS
    if len(names) <= _WITH_COUNTS:
        heatmap |= {"text": [[str(n) if n else "" for n in row] for row in counts.tolist()], "texttemplate": "%{text}"}
        short = [html.escape(short_class_name(name), quote=False) for name in outcome.class_names]
        axis = {"tickvals": [*classes], "ticktext": short, "showgrid": False, "zeroline": False}
    # A slanted name at the right edge would be hidden.
    x = {**axis, "title": {"text": "taken for"}, "constrain": "domain", "autotickangles": [0, 90]}
    y = {**axis, "title": {"text": "class"}, "autorange": "reversed", "scaleanchor": "x"}
    return Chart(chart, "confusion matrix", [heatmap], {"xaxis": x, "yaxis": y}, curve=False)


def reliability_charts(number: int, outcome: Outcome) -> list[Chart]:
    """Return a diagram of the accuracy by probability without a temperature, and one with it if there is one."""
    temperatures = dict.fromkeys((1.0, outcome.temperature) if len(outcome.known) else ())
    outcomes = enumerate(replace(outcome, temperature=each) for each in temperatures)
    return [_reliability(f"reliability-{number}-{place}", each) for place, each in outcomes]


def _reliability(chart: str, outcome: Outcome) -> Chart:
    bins = outcome.reliability
    rows, width = np.flatnonzero(bins.counts), 1 / len(bins.counts)
    counts = bins.counts[rows]
    probability, accuracy = (sums[rows] / counts for sums in bins[1:])
    values = zip(counts.tolist(), probability.tolist(), accuracy.tolist(), strict=True)
    hover = [f"{counted(n, 'image')}<br>mean probability {p:.1%}<br>accuracy {right:.1%}" for n, p, right in values]
    bar: dict[str, Any] = {"type": "bar", "x": numbers((rows + 0.5) * width), "width": 0.9 * width}
    bar |= {"marker": {"color": COLOURS[0]}, "hoverinfo": "text", "hovertext": hover}
    texts = {"text": [f"{n:,}" for n in counts.tolist()], "textposition": "outside", "textangle": 0}
    data = [bar | {"y": numbers(accuracy)}, bar | texts | {"y": counts.tolist(), "yaxis": "y2"}]
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "line": {"color": "gray", "dash": "dash"}}
    x = {"range": [0, 1.05], "tickformat": ".0%", "title": {"text": "probability of the predicted class"}}
    y = {"range": [0, 1], "tickformat": ".0%", "title": {"text": "accuracy"}, "domain": [0.33, 1]}
    y2 = {"title": {"text": "images"}, "domain": [0, 0.2], "showticklabels": False, "showgrid": False}
    layout = {"xaxis": x | {"anchor": "y2"}, "yaxis": y, "yaxis2": y2, "shapes": [diagonal], "barmode": "overlay"}
    # Numbers of images that do not fit are hidden.
    layout["uniformtext"] = {"mode": "hide", "minsize": 12}
    state = "before calibration" if outcome.temperature == 1 else f"with temperature {outcome.temperature:.4g}"
    return Chart(chart, f"expected calibration error {bins.error:.2%} {state}", data, layout, main=True, curve=False)


def feature_map(number: int, images: ValidationImages) -> FeatureMap:
    """Return the map of the validation images of run `number` of the report. The same run gives the same map.

    Raises: InputError if the features cannot be read, or there are too few images.
    """
    outcome, rows = images.outcome, chosen_rows(images.outcome.known)
    features = images.run.features(images.source.rows(rows))
    finite = np.isfinite(features).all(1)
    rows, features = rows[finite], features[finite]
    if len(rows) < _LEAST_IMAGES:
        raise InputError(f"there are {counted(len(rows), 'image')} with features; {_LEAST_IMAGES} are needed")
    method, points = project(features)
    labels, guesses = outcome.labels[rows], outcome.predictions[rows]
    names = [images.source.name(int(row)) for row in rows]
    data = traces(points, labels, guesses, names, outcome.class_names)
    axes = {"xaxis": _NO_AXIS, "yaxis": {**_NO_AXIS, "scaleanchor": "x"}}
    layout = {**axes, "showlegend": len(outcome.class_names) <= _MOST_NAMED}
    sample = f", a random sample of {len(outcome.known):,}" if len(rows) < len(outcome.known) else ""
    note = f"{method} of the features of {counted(len(rows), 'validation image')}{sample}. "
    note += "A cross is a wrong prediction. Distances between clusters have no meaning."
    return FeatureMap(Chart(f"features-{number}", "Features", data, layout, curve=False), note)


def chosen_rows(known: np.ndarray) -> np.ndarray:
    """Return at most `MOST_IMAGES` of some rows, in ascending order. The choice depends on their number alone."""
    return known[np.sort(permutation(len(known), _SEED, 0)[:MOST_IMAGES])]


def project(features: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the name of the method, and a point of the plane for each image, float[N, 2].

    UMAP is used if umap-learn is installed, else t-SNE. One thread computes the points, because the sums of several
    threads are rounded differently.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if find_spec("umap") is not None:
        import umap  # pyright: ignore[reportMissingImports]

        neighbours = min(_NEIGHBOURS, len(features) - 1)
        points = umap.UMAP(n_neighbors=neighbours, random_state=_SEED, n_jobs=1).fit_transform(features)
        return f"UMAP (umap-learn; {neighbours} neighbours, seed {_SEED})", np.asarray(points)
    perplexity = min(_PERPLEXITY, (len(features) - 1) / 3)
    start: Any = "pca" if min(features.shape) > 1 else "random"
    with threadpool_limits(1):
        points = TSNE(perplexity=perplexity, init=start, random_state=_SEED, n_jobs=1).fit_transform(features)
    return f"t-SNE (scikit-learn; perplexity {perplexity:.3g}, seed {_SEED})", np.asarray(points)


def traces(
    points: np.ndarray, labels: np.ndarray, guesses: np.ndarray, names: list[str], class_names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return a trace for each class with images, for plotly.

    Args:
        points: float[N, 2].
        labels, guesses: int[N], the classes and the predicted classes.
    """
    names, classes = ([html.escape(name, quote=False) for name in each] for each in (names, class_names))
    data = []
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        hover = [f"{names[row]}<br>{classes[label]}, taken for {classes[guesses[row]]}" for row in members]
        symbols = ["circle" if guesses[row] == label else "x" for row in members]
        marker = {"color": _colour(label, len(classes)), "size": 6, "opacity": 0.8, "symbol": symbols}
        # A legend of long names would leave the map no room.
        short = html.escape(short_class_name(class_names[label]), quote=False)
        trace = {"type": "scatter", "mode": "markers", "name": short, "marker": marker, "hoverinfo": "text"}
        x, y = map(numbers, points[members].T)
        data.append(trace | {"x": x, "y": y, "hovertext": hover})
    return data


def _colour(label: int, num_classes: int) -> str:
    """Return the colour of a class: of the palette, or of equally spaced hues if there are more classes."""
    hue = f"hsl({360 * label / num_classes:.0f},65%,{(45, 62)[label % 2]}%)"
    return COLOURS[label] if num_classes <= len(COLOURS) else hue
