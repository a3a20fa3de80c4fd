"""The predictions of a trained network for images, their statistics if the images have labels, and formats of files.

Predictions are written as CSV, JSON lines, Parquet or in Kaggle's format; features as NumPy's .npz or Parquet. Rows are
written as they come, so that they need little memory.
"""

import csv
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from jaxddp.calibration import Reliability, log_probabilities, reliability
from jaxddp.config.values import checked
from jaxddp.core import files
from jaxddp.core.errors import InputError, choices, counted, figure, requires, some
from jaxddp.data.formats import array_files, numpy_files
from jaxddp.data.source import LabelForm, Labels, Table

Item = TypeVar("Item")
OutputCell = str | float | None
OutputRow = dict[str, OutputCell]
_OF_A_CLASS = {"class": str, "probability": float}
_NOT_FINITE = "the network's output is not finite"


def columns_of(top: int, *, sets: bool = False, numbers: Sequence[str] = ()) -> dict[str, type]:
    """Return the columns `id,class,probability,class_2,probability_2,…,error` with their types.

    With sets, `set` is before the error. If a network predicts `numbers`, each is a column in place of the classes.

    Raises: InputError if a number is called like another column.
    """
    if taken := {*numbers} & {"id", "error"}:
        raise InputError(f"column {min(taken)}: is a number of the network, and a column of every file of predictions")
    if numbers:
        return {"id": str, **dict.fromkeys(numbers, float), "error": str}
    places = ["" if place == 1 else f"_{place}" for place in range(1, top + 1)]
    of_classes = {f"{name}{place}": kind for place in places for name, kind in _OF_A_CLASS.items()}
    return {"id": str, **of_classes, **({"set": str} if sets else {}), "error": str}


@dataclass(frozen=True)
class Predictions:
    """The predictions of N images out of K classes.

    Attributes:
        ids: the ids of the N images, such as file names.
        probabilities: float32[N, K], in the order of the classes; NaN for an image that cannot be used. They are the
            numbers themselves if the network predicts numbers.
        class_ids: the ids of the K classes, by which data sets are compared, such as folder names; or of the numbers.
        class_names: the names of the K classes, for display.
        errors: the faults of unusable images, by row.
        form: the form of the labels that the network predicts.
    """

    ids: Sequence[str]
    probabilities: np.ndarray
    class_ids: Sequence[str]
    class_names: Sequence[str]
    errors: Mapping[int, str] = field(default_factory=dict)
    form: LabelForm = "one label"

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        classes = f"{counted(len(self.class_names), 'class')} ({some(self.class_names)})"
        unusable = f", {len(self.errors):,} cannot be used" if self.errors else ""
        return f"Predictions({counted(len(self), 'image')} of {classes}{unusable})"

    @cached_property
    def labels(self) -> np.ndarray:
        """int32[N], the most probable class; -1 for an image that cannot be used. Raises: InputError for numbers."""
        return np.where(self._known, self._sorted[:, 0], -1).astype(np.int32)

    @property
    def classes(self) -> list[str | None]:
        """The name of each image's most probable class."""
        return [self.class_names[int(label)] if label >= 0 else None for label in self.labels]

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most probable classes, int64[N, k], and their probabilities, float32[N, k].

        Equally probable classes are in their original order. Raises: InputError if there are fewer than k classes, or
        the network predicts numbers.
        """
        if not 1 <= checked(k, int, "k") <= len(self.class_ids):
            raise InputError(f"k={k}: expected 1 to {len(self.class_ids)}, the number of classes")
        labels = self._sorted[:, :k]
        return labels, np.take_along_axis(self.probabilities, labels, 1)

    def rows(self, top: int = 5, min_confidence: float = 0.0, threshold: float | None = None) -> Iterator[OutputRow]:
        """Yield a row of `columns_of` for each image: class ids, and probabilities with all digits of a float32.

        Args:
            min_confidence: the class is "unknown" if its probability is smaller.
            threshold: with it, the column `set` has all classes of at least this probability, separated by ";".
        """
        top = min(checked(top, int, "top"), len(self.class_ids))
        columns = self._columns(top, sets=threshold is not None)
        labels, shares = (np.empty((0, 0)),) * 2 if self.form == "numbers" else self.top(top)
        for row, identity in enumerate(self.ids):
            error = self.errors.get(row) or (None if self._known[row] else _NOT_FINITE)
            cells: list[OutputCell] = [None] * (len(columns) - 2)
            if error is None and self.form == "numbers":
                cells = [float(str(number)) for number in self.probabilities[row]]
            elif error is None:
                cells[: 2 * top : 2] = [self.class_ids[int(label)] for label in labels[row]]
                # The shortest decimal that rounds to this float32.
                cells[1 : 2 * top : 2] = [float(str(share)) for share in shares[row]]
                if shares[row, 0] < min_confidence:
                    cells[0] = "unknown"
                if threshold is not None:
                    size = (self.probabilities[row] >= threshold).sum()
                    cells[-1] = ";".join(self.class_ids[int(label)] for label in self._sorted[row, :size])
            yield dict(zip(columns, (identity, *cells, error), strict=True))

    def to_frame(self, top: int = 5) -> Any:
        """Return `rows` as a pandas DataFrame. Raises: InputError if pandas is not installed."""
        with requires("to_frame", "pandas", "pandas"):
            import pandas
        return pandas.DataFrame([*self.rows(top)], columns=[*self._columns(min(top, len(self.class_ids)))])

    def _columns(self, top: int, *, sets: bool = False) -> dict[str, type]:
        return columns_of(top, sets=sets, numbers=self.class_ids if self.form == "numbers" else ())

    @cached_property
    def _known(self) -> np.ndarray:
        """bool[N]: whether the probabilities of the image are finite."""
        return np.asarray(np.isfinite(self.probabilities).all(1))

    @cached_property
    def _sorted(self) -> np.ndarray:
        if self.form == "numbers":
            raise InputError("the network predicts numbers, which have no classes; read `probabilities` or `rows()`")
        return np.argsort(-self.probabilities, axis=1, kind="stable")


class Confusion(NamedTuple):
    """The number of images of class `label` with the prediction `prediction`, and their share of the class."""

    label: int
    prediction: int
    images: int
    share: float


@dataclass(frozen=True)
class Outcome:
    """The predictions of N images out of K classes, with their labels.

    Images without a label, and images with a probability that is not finite, are excluded from the statistics.

    Attributes:
        labels: int[N]; negative if unknown.
        logits: float[N, K].
        class_names: the names of the K classes, for display.
        step: the step of the checkpoint.
        temperature: the probabilities are softmax(logits / temperature).
    """

    labels: np.ndarray
    logits: np.ndarray
    class_names: tuple[str, ...]
    step: int
    temperature: float = 1.0

    def __repr__(self) -> str:
        accuracy = f"accuracy {figure('accuracy', self.accuracy)} of {counted(len(self.known), 'image')}"
        return f"Outcome(step {self.step:,}: {accuracy}, {counted(len(self.class_names), 'class')})"

    @cached_property
    def probabilities(self) -> np.ndarray:
        """float64[N, K]."""
        return np.exp(log_probabilities(self.logits, self.temperature))

    @property
    def reliability(self) -> Reliability:
        """The accuracy and the calibration error of predictions by their probability."""
        return reliability(self.probability(self.known), (self.predictions == self.labels)[self.known])

    @cached_property
    def known(self) -> np.ndarray:
        """The rows that are not excluded, int64[M]."""
        return np.flatnonzero((self.labels >= 0) & np.isfinite(self.probabilities).all(1))

    @cached_property
    def predictions(self) -> np.ndarray:
        """The most probable class of each image, int64[N]; the first among equally probable classes."""
        return self.probabilities.argmax(1)

    @cached_property
    def confusion(self) -> np.ndarray:
        """int64[K, K]: the number of images of each class (row) that were predicted as each class (column)."""
        matrix = np.zeros((len(self.class_names),) * 2, np.int64)
        np.add.at(matrix, (self.labels[self.known], self.predictions[self.known]), 1)
        return matrix

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy; NaN without images."""
        return float(self.confusion.trace() / self.confusion.sum()) if len(self.known) else float("nan")

    @property
    def class_counts(self) -> np.ndarray:
        """The number of images of each class, int64[K]."""
        return self.confusion.sum(1)

    @property
    def class_accuracy(self) -> np.ndarray:
        """The accuracy of each class, float64[K]; NaN for a class without images."""
        counts = self.class_counts
        return np.divide(self.confusion.diagonal(), counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def confusions(self, most: int) -> list[Confusion]:
        """Return the most frequent confusions. Equally frequent confusions are in the order of the classes."""
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        labels, predictions = np.unravel_index(np.argsort(-wrong, axis=None, kind="stable")[:most], wrong.shape)
        return [
            Confusion(label, guess, int(wrong[label, guess]), float(wrong[label, guess] / self.class_counts[label]))
            for label, guess in zip(labels.tolist(), predictions.tolist(), strict=True)
            if wrong[label, guess]
        ]

    def surest_mistakes(self, most: int) -> np.ndarray:
        """Return the rows of the wrong predictions with the highest probabilities, int64[at most `most`]."""
        wrong = self.known[self.predictions[self.known] != self.labels[self.known]]
        return wrong[np.argsort(-self.probability(wrong), kind="stable")[:most]]

    def probability(self, rows: np.ndarray) -> np.ndarray:
        """Return the probability of the predicted class, float[n]."""
        return self.probabilities[rows, self.predictions[rows]]


PredictionFormat = Literal["csv", "jsonl", "parquet", "kaggle"]
FeatureFormat = Literal["npz", "parquet"]
_AT_ONCE, _BYTES_AT_ONCE = 4096, 1 << 24
_THREADS = 16
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The date of the members of a .npz file, so that equal features give equal bytes."""
_ADVICE = "give a file that `jaxddp features` wrote"


@dataclass(frozen=True)
class FeatureColumns:
    """The content of a feature file except the features and the faults.

    A .npz file has these arrays:

    - `features`: float32[N, D], or float32[N, …] with `--pool none`; NaN for an image that cannot be used;
    - `ids`: text[N], the ids of the images;
    - `errors`: text[N], the faults of unusable images; empty for all others;
    - `labels`: int32[N], from 0, or [N, K] for other forms of labels; only if images have labels;
    - `class_ids`, `class_names`: text[K], with `labels`;
    - `layer`: text, empty for the input of the head; `network`: text, the run and the step, or the weights.

    A .parquet file has the columns `id`, `features` (a list of float32 values, flat), `label` and `error`. The other
    values are in the schema's metadata, as JSON under `jaxddp`.

    Attributes:
        shape: the shape of the features of an image.
    """

    ids: Sequence[str]
    labels: Labels
    shape: tuple[int, ...]
    layer: str
    network: str

    @property
    def about(self) -> dict[str, Any]:
        """The layer and the network, and the classes of images with labels."""
        classes = {"class_ids": self.labels.ids, "class_names": self.labels.names} if self.labels.ids else {}
        return {"layer": self.layer, "network": self.network, **classes}


@dataclass(frozen=True)
class LabelledFeatures:
    """The features of N labelled images of K classes. Images that cannot be used are left out.

    Attributes:
        path: the file.
        features: float32[N, D].
        labels: int64[N].
        omitted: the number of images that are left out, because they have no finite features or no label.
        network: the network and the layer.
    """

    path: Path
    features: np.ndarray
    labels: np.ndarray
    class_ids: tuple[str, ...]
    omitted: int
    network: tuple[str, str]


def format_of(out: Path, kind: Any, advice: str = "") -> Any:
    """Return the format in `PredictionFormat` or `FeatureFormat` of a file from its suffix. Raises: InputError."""
    names = [name for name in get_args(kind) if name != "kaggle"]
    form = out.suffix[1:].lower()
    if form not in names:
        raise InputError(f"{out}: its extension names no format; {choices(form, names)}{advice}")
    return form


def parquet_library() -> Any:
    """Return `pyarrow`, with `pyarrow.parquet`. Raises: InputError if it is not installed."""
    with requires("format=parquet", "pyarrow", "parquet"):
        import pyarrow.parquet
    return pyarrow


def write_prediction_rows(
    file: BinaryIO, form: PredictionFormat, columns: Mapping[str, type], rows: Iterable[OutputRow], source: Table
) -> None:
    """Write the predictions of all images of the source, in order. `columns` are those of `columns_of`."""
    if form == "jsonl":
        file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)
    elif form == "parquet":
        arrow = parquet_library()
        types = {str: arrow.string(), float: arrow.float32()}
        _write_parquet(file, arrow.schema([(name, types[kind]) for name, kind in columns.items()]), rows, _AT_ONCE)
    else:
        lines = _kaggle(columns, rows, source) if form == "kaggle" else (row.values() for row in rows)
        text = io.TextIOWrapper(file, "utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["ImageId", "PredictionString"] if form == "kaggle" else columns)
        writer.writerows(lines)
        text.detach()


def write_feature_rows(
    file: BinaryIO, form: FeatureFormat, columns: FeatureColumns, rows: Iterable[tuple[np.ndarray, Any]]
) -> None:
    """Write the features of all images, float32[D], in order, each with its fault or None."""
    {"npz": _write_npz, "parquet": _write_feature_parquet}[form](file, columns, rows)


def read_features(path: Path) -> LabelledFeatures:
    """Read a .npz or .parquet file of `jaxddp features`.

    Raises: InputError if the file cannot be read, is no such file, or its images have no label or several.
    """
    read = {"npz": _read_npz, "parquet": _read_parquet}[format_of(path, FeatureFormat)]
    with array_files.as_input_errors(path, _ADVICE):
        with files.open_regular(path) as file:
            arrays = read(path, file)
        if missing := [name for name in ("features", "layer", "network") if name not in arrays]:
            raise InputError(f"is no feature file: it has no {missing[0]}; {_ADVICE}")
        if "labels" not in arrays:
            raise InputError("its images have no labels, which a probe needs; compute the features of a data set")
        features, labels = arrays["features"], arrays["labels"]
        if labels.ndim > 1:
            raise InputError("its images may have several labels or numbers, and a probe takes one label")
        features = features.reshape(len(features), -1)
        usable = np.isfinite(features).all(1) & (labels >= 0)
        if not usable.any():
            raise InputError(f"has no image with features and a label; {_ADVICE}")
        network, ids = (str(arrays["network"]), str(arrays["layer"])), tuple(map(str, arrays["class_ids"]))
        if labels.shape != usable.shape or (labels >= len(ids)).any():
            raise ValueError("its labels are not those of its images and classes")
    omitted = int((~usable).sum())
    return LabelledFeatures(path, features[usable], labels[usable].astype(np.int64), ids, omitted, network)


def _write_npz(file: BinaryIO, columns: FeatureColumns, rows: Iterable[tuple[np.ndarray, Any]]) -> None:
    errors = list[str]()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def member(name: str) -> Any:
            return archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True)

        with member("features") as array:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(columns.ids), *columns.shape)}
            np.lib.format.write_array_header_2_0(array, header)
            for features, error in rows:
                array.write(features.tobytes())
                errors.append(error or "")
        arrays: dict[str, Any] = {"ids": columns.ids, "errors": errors, **columns.about}
        texts = {name: np.array(values, np.str_) for name, values in arrays.items()}
        for name, values in (texts | ({"labels": columns.labels.values} if columns.labels.ids else {})).items():
            with member(name) as array:
                np.lib.format.write_array(array, values, allow_pickle=False)


def _write_feature_parquet(file: BinaryIO, columns: FeatureColumns, rows: Iterable[tuple[np.ndarray, Any]]) -> None:
    arrow, length, labels = parquet_library(), int(np.prod(columns.shape)), columns.labels
    fields = [("id", arrow.string()), ("features", arrow.list_(arrow.float32(), length))]
    if labels.ids:
        kind = arrow.from_numpy_dtype(labels.values.dtype)
        fields.append(("label", arrow.list_(kind) if labels.has_rows else kind))
    about = json.dumps({**columns.about, "shape": columns.shape})
    schema = arrow.schema([*fields, ("error", arrow.string())], {"jaxddp": about})
    parts = zip(columns.ids, labels.values, rows, strict=True)
    named = ({"id": id, "features": values, "label": label, "error": error} for id, label, (values, error) in parts)
    _write_parquet(file, schema, named, max(1, _BYTES_AT_ONCE // (4 * length)))


def _write_parquet(file: BinaryIO, schema: Any, rows: Iterable[dict[str, Any]], at_once: int) -> None:
    with parquet_library().parquet.ParquetWriter(file, schema) as writer:
        for block in _blocks(rows, at_once):
            writer.write_table(parquet_library().Table.from_pylist(block, schema=schema))


def _read_npz(path: Path, file: BinaryIO) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()} - {"ids", "errors"}
    return {name: numpy_files.unpack_array(path, name) for name in names}


def _read_parquet(path: Path, file: BinaryIO) -> dict[str, Any]:
    table = parquet_library().parquet.read_table(file)
    arrays: dict[str, Any] = files.parse_json((table.schema.metadata or {}).get(b"jaxddp", b"{}"), dict)
    if "features" in table.column_names:
        values = table["features"].combine_chunks()
        arrays["features"] = np.asarray(values.flatten(), np.float32).reshape(len(table), -1)
    if "label" in table.column_names:
        arrays["labels"] = np.array(table["label"].to_pylist())
    return arrays


def _kaggle(columns: Iterable[str], rows: Iterable[OutputRow], source: Table) -> Iterator[tuple[object, str]]:
    """Yield the lines of the submission file of the ImageNet localization challenge. Every box is the whole image.

    An unusable image has an empty prediction.
    """
    from jaxddp.data.images import parse_header

    classes = [column for column in columns if column.startswith("class")]

    def line(index: int, row: OutputRow) -> tuple[object, str]:
        if row["error"] is not None:
            return row["id"], ""
        header = parse_header(source.read(index))
        box = f"0 0 {header.width - 1} {header.height - 1}"
        return row["id"], " ".join(f"{row[column]} {box}" for column in classes)

    with ThreadPoolExecutor(_THREADS) as pool:
        for some in _blocks(enumerate(rows), _AT_ONCE):
            yield from pool.map(line, *zip(*some, strict=True))


def _blocks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block
