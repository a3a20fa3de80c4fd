"""A map of validation images: similar features are close together. The points are computed by t-SNE or UMAP.

Sources: van der Maaten and Hinton 2008, "Visualizing data using t-SNE" (JMLR 9); McInnes et al. 2018, "UMAP"
(arXiv:1802.03426).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, not_installed
from jaxddp.reports.charts import COLOURS, Chart, numbers, plain

if TYPE_CHECKING:
    from jaxddp.reports.validation_images import ValidationImages

MOST_IMAGES = 2000
"""The maximum number of points. t-SNE of 2,000 points with 512 features takes 5 s of CPU time."""
_LEAST_IMAGES = 5
_MOST_NAMED = 20
"""The maximum number of classes in the legend. With more classes, the legend would not fit."""
_PERPLEXITY, _NEIGHBOURS, _SEED = 30, 15, 0


class FeatureMap(NamedTuple):
    """A chart with a point for each image, and a line about how it was made."""

    chart: Chart
    note: str


def check_feature_map() -> None:
    """Raise `InputError` if scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        raise InputError(f"--features: {not_installed('scikit-learn', 'features')}") from None


def feature_map(number: int, images: "ValidationImages") -> FeatureMap:
    """Return the map of a run's validation images. The same run gives the same map.

    Args:
        number: the number of the run in the report.

    Raises:
        InputError: the features cannot be read, or there are too few images.
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
    blank = {"showticklabels": False, "ticks": "", "zeroline": False, "showgrid": False}
    layout = {
        "xaxis": blank,
        "yaxis": {**blank, "scaleanchor": "x"},
        "showlegend": len(outcome.class_names) <= _MOST_NAMED,
    }
    note = f"{method} of the features of {counted(len(rows), 'validation image')}"
    note += f", a random sample of {len(outcome.known):,}" if len(rows) < len(outcome.known) else ""
    note += ". A cross is a wrong prediction. Distances between groups have no meaning."
    return FeatureMap(Chart(f"features-{number}", "Features", data, layout, curve=False), note)


def chosen_rows(known: np.ndarray) -> np.ndarray:
    """Return at most `MOST_IMAGES` of some rows, in ascending order. The choice depends on their number alone."""
    from jaxddp.data.order import permutation

    return known[np.sort(permutation(len(known), _SEED, 0)[:MOST_IMAGES])]


def project(features: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the name of the method, and a point of the plane for each image, float[N, 2].

    UMAP is used if umap-learn is installed, else t-SNE. One thread computes the points, because the sums of several
    threads are rounded differently.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    try:
        import umap  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        umap = None
    if umap is not None:
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
    data = []
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        hover = [
            f"{plain(names[row])}<br>{plain(class_names[label])}, taken for {plain(class_names[int(guesses[row])])}"
            for row in members
        ]
        symbols = ["circle" if guesses[row] == label else "x" for row in members]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(class_names[label]),
                "x": numbers(points[members, 0]),
                "y": numbers(points[members, 1]),
                "marker": {"color": _colour(label, len(class_names)), "size": 6, "opacity": 0.8, "symbol": symbols},
                "hovertext": hover,
                "hoverinfo": "text",
            }
        )
    return data


def _colour(label: int, num_classes: int) -> str:
    """Return the colour of a class: of the palette, or of equally spaced hues if there are more classes."""
    if num_classes <= len(COLOURS):
        return COLOURS[label]
    lightness = (45, 62)[label % 2]
    return f"hsl({360 * label / num_classes:.0f},65%,{lightness}%)"
