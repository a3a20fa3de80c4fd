"""The accuracy of runs by class: confusion matrices, accuracies of classes, most confident mistakes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxddp.core.wording import counted
from jaxddp.inference.outcome import Outcome
from jaxddp.reports.charts import Chart, plain
from jaxddp.reports.feature_map import FeatureMap
from jaxddp.reports.text_tables import NOTHING, Cell, Column, TextTable
from jaxddp.reports.validation_images import ValidationImages, thumbnails
from jaxddp.training.validation.predicted_images import short_class_name

MOST_MISTAKES = 24
MOST_CONFUSIONS = 20
_MOST_IN_SIGHT = 10
"""The maximum number of confusions in a table that does not scroll."""
LARGEST_MATRIX = 100
"""The maximum number of classes of a confusion matrix. With more classes, no matrix is drawn."""
_WITH_COUNTS = 20
"""The maximum number of classes of a matrix with counts in its cells."""


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
        counts: the number of images of each class, int64[K].
        accuracies: the accuracy of each class, float64[K]; NaN for a class without images.
        features: a map of the features of the images; None without features.
    """

    name: str
    colour: str
    summary: str
    matrix: Chart | None
    confusions: TextTable
    mistakes: list[Mistake]
    class_names: tuple[str, ...]
    counts: np.ndarray
    accuracies: np.ndarray
    features: FeatureMap | None = None


def run_classes(number: int, name: str, colour: str, images: ValidationImages) -> RunClasses:
    """Return the confusion matrix, the most frequent confusions and the most confident mistakes of a run."""
    outcome = images.outcome
    names = outcome.class_names
    unusable = len(outcome.labels) - len(outcome.known)
    summary = f"step {outcome.step:,}: {outcome.accuracy:.2%} of {counted(len(outcome.known), 'image')} right"
    summary += f", {unusable:,} cannot be used" if unusable else ""
    matrix = _matrix(f"matrix-{number}", outcome) if len(names) <= LARGEST_MATRIX else None
    parts = (matrix, _confusions(outcome), _mistakes(images))
    return RunClasses(name, colour, summary, *parts, names, outcome.class_counts, outcome.class_accuracy)


def accuracy_tables(runs: Sequence[RunClasses]) -> list[TextTable]:
    """Return tables with the accuracy of each class in each run, the worst class first.

    Runs with the same classes, and with the same number of images in each class, are in one table.
    """
    groups: dict[tuple[object, ...], list[RunClasses]] = {}
    for run in runs:
        groups.setdefault((run.class_names, *run.counts.tolist()), []).append(run)
    return [_accuracies(members) for members in groups.values()]


def _accuracies(runs: Sequence[RunClasses]) -> TextTable:
    first, accuracies = runs[0], np.stack([run.accuracies for run in runs])
    columns = (Column("class", number=False), Column("images"), *(Column(run.name) for run in runs))
    rows = []
    # Classes without images come last.
    for label in np.argsort(accuracies.mean(0), kind="stable").tolist():
        cells = [
            Cell(NOTHING) if np.isnan(share) else Cell(f"{share:.1%}", run.colour, share)
            for share, run in zip(accuracies[:, label].tolist(), runs, strict=True)
        ]
        rows.append((Cell(first.class_names[label]), Cell(f"{first.counts[label]:,}"), *cells))
    return TextTable(columns, rows, tall=True)


def _matrix(chart: str, outcome: Outcome) -> Chart:
    counts, names = outcome.confusion, outcome.class_names
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    hover = [[_hover(outcome, row, column) for column in range(len(names))] for row in range(len(names))]
    heatmap: dict[str, Any] = {
        "type": "heatmap",
        "z": [[round(share, 4) for share in row] for row in shares.tolist()],
        "hovertext": hover,
        "hoverinfo": "text",
        "showscale": False,
        "zmin": 0,
        "zmax": 1,
        "xgap": 1,
        "ygap": 1,
    }
    if len(names) <= _WITH_COUNTS:
        heatmap |= {"text": [[str(n) if n else "" for n in row] for row in counts.tolist()], "texttemplate": "%{text}"}
    ticks: dict[str, Any] = {
        "tickvals": [*range(len(names))],
        "ticktext": [plain(short_class_name(name)) for name in names],
    }
    if len(names) > _WITH_COUNTS:
        # The labels of many classes would overlap. The names are in the text under the pointer.
        ticks = {"showticklabels": False, "ticks": ""}
    ticks |= {"showgrid": False, "zeroline": False}
    layout = {
        "xaxis": {**ticks, "title": {"text": "taken for"}, "constrain": "domain"},
        "yaxis": {**ticks, "title": {"text": "class"}, "autorange": "reversed", "scaleanchor": "x"},
    }
    return Chart(chart, "confusion matrix", [heatmap], layout, curve=False)


def _hover(outcome: Outcome, label: int, guess: int) -> str:
    """Return the text under the pointer for a cell of the matrix, with plotly's markup."""
    count, names = int(outcome.confusion[label, guess]), outcome.class_names
    if not count:
        return ""
    whole = int(outcome.class_counts[label])
    result = "recognized" if label == guess else f"taken for {plain(names[guess])}"
    return f"{plain(names[label])} {result}:<br>{count:,} of {whole:,} ({count / whole:.1%})"


def _confusions(outcome: Outcome) -> TextTable:
    columns = (
        Column("class", number=False),
        Column("taken for", number=False),
        Column("images"),
        Column("of the class"),
    )
    rows = [
        (
            Cell(outcome.class_names[confusion.label]),
            Cell(outcome.class_names[confusion.prediction]),
            Cell(f"{confusion.images:,}"),
            Cell(f"{confusion.share:.1%}"),
        )
        for confusion in outcome.confusions(MOST_CONFUSIONS)
    ]
    return TextTable(columns, rows, tall=len(rows) > _MOST_IN_SIGHT)


def _mistakes(images: ValidationImages) -> list[Mistake]:
    outcome, source, data, _ = images
    rows = outcome.surest_mistakes(MOST_MISTAKES)
    shares = [f"{share:.1%}" for share in outcome.probability(rows).tolist()]
    names = outcome.class_names
    return [
        Mistake(url, source.name(row), names[outcome.labels[row]], names[outcome.predictions[row]], share)
        for url, row, share in zip(thumbnails(source, data, rows), rows.tolist(), shares, strict=True)
    ]
