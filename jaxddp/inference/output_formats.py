"""The formats of files with a row for each image: predictions in CSV, JSON lines, Parquet and Kaggle's, and features.

Feature files are NumPy's .npz and Parquet. Rows are written as they come, so that they need little memory.
"""

import csv
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, get_args

import numpy as np

from jaxddp.core import files
from jaxddp.core.errors import InputError, choices, not_installed
from jaxddp.data.formats.array_files import as_input_errors
from jaxddp.data.formats.numpy_files import unpack_array
from jaxddp.data.images import parse_header
from jaxddp.data.source import Labels, Table
from jaxddp.inference.predictions import OutputRow

Item = TypeVar("Item")
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
    - `labels`: int32[N], from 0, or uint8[N, K] if images may have several labels; only if images have labels;
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


def parquet_library() -> tuple[Any, Any]:
    """Return the modules `pyarrow` and `pyarrow.parquet`. Raises: InputError if pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise InputError(f"format=parquet: {not_installed('pyarrow', 'parquet')}") from None
    return pyarrow, parquet


def write_prediction_rows(
    file: BinaryIO, form: PredictionFormat, columns: list[str], rows: Iterable[OutputRow], source: Table
) -> None:
    """Write the predictions of all images of the source, in order."""
    if form == "jsonl":
        file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)
    elif form == "parquet":
        pyarrow, _ = parquet_library()
        kinds = {"probability": pyarrow.float32()}
        schema = pyarrow.schema([(name, kinds.get(name.split("_")[0], pyarrow.string())) for name in columns])
        _write_parquet(file, schema, rows, _AT_ONCE)
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
    write = {"npz": _write_npz, "parquet": _write_feature_parquet}
    write[form](file, columns, rows)


def read_features(path: Path) -> LabelledFeatures:
    """Read a .npz or .parquet file of `jaxddp features`.

    Raises:
        InputError: the file cannot be read, is no such file, or its images have no label or several.
    """
    read = {"npz": _read_npz, "parquet": _read_parquet}[format_of(path, FeatureFormat)]
    with files.reading(path, _ADVICE), as_input_errors(path, _ADVICE, missing=_ADVICE):
        with files.open_regular(path) as file:
            arrays = read(path, file)
        if missing := [name for name in ("features", "layer", "network") if name not in arrays]:
            raise InputError(f"is no feature file: it has no {missing[0]}; {_ADVICE}")
        if "labels" not in arrays:
            raise InputError("its images have no labels, which a probe needs; compute the features of a data set")
        features, labels = arrays["features"], arrays["labels"]
        if labels.ndim > 1:
            raise InputError("its images may have several labels, and a probe takes one")
        features = features.reshape(len(features), -1)
        usable = np.isfinite(features).all(1) & (labels >= 0)
        if not usable.any():
            raise InputError(f"has no image with features and a label; {_ADVICE}")
        network, ids = (str(arrays["network"]), str(arrays["layer"])), tuple(map(str, arrays["class_ids"]))
    omitted = int((~usable).sum())
    return LabelledFeatures(path, features[usable], labels[usable].astype(np.int64), ids, omitted, network)


def _write_npz(file: BinaryIO, columns: FeatureColumns, rows: Iterable[tuple[np.ndarray, Any]]) -> None:
    errors = list[str]()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def member(name: str) -> Any:
            return archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True)

        with member("features") as array:
            shape = len(columns.ids), *columns.shape
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
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
    pyarrow, _ = parquet_library()
    length, labels = int(np.prod(columns.shape)), columns.labels
    fields = [("id", pyarrow.string()), ("features", pyarrow.list_(pyarrow.float32(), length))]
    if labels.ids:
        fields.append(("label", pyarrow.list_(pyarrow.uint8()) if labels.several else pyarrow.int32()))
    about = json.dumps({**columns.about, "shape": columns.shape})
    schema = pyarrow.schema([*fields, ("error", pyarrow.string())], {"jaxddp": about})
    parts = zip(columns.ids, labels.values, rows, strict=True)
    named = ({"id": id, "features": values, "label": label, "error": error} for id, label, (values, error) in parts)
    _write_parquet(file, schema, named, max(1, _BYTES_AT_ONCE // (4 * length)))


def _write_parquet(file: BinaryIO, schema: Any, rows: Iterable[dict[str, Any]], at_once: int) -> None:
    pyarrow, parquet = parquet_library()
    with parquet.ParquetWriter(file, schema) as writer:
        for block in _blocks(rows, at_once):
            writer.write_table(pyarrow.Table.from_pylist(block, schema=schema))


def _read_npz(path: Path, file: BinaryIO) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()} - {"ids", "errors"}
    return {name: unpack_array(path, name) for name in names}


def _read_parquet(path: Path, file: BinaryIO) -> dict[str, Any]:
    _, parquet = parquet_library()
    table = parquet.read_table(file)
    arrays: dict[str, Any] = files.parse_json((table.schema.metadata or {}).get(b"jaxddp", b"{}"), dict)
    if "features" in table.column_names:
        values = table["features"].combine_chunks()
        arrays["features"] = np.asarray(values.flatten(), np.float32).reshape(len(table), -1)
    if "label" in table.column_names:
        arrays["labels"] = np.array(table["label"].to_pylist())
    return arrays


def _kaggle(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[tuple[object, str]]:
    """Yield the lines of the submission file of the ImageNet localization challenge. Every box is the whole image.

    An unusable image has an empty prediction.
    """
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
