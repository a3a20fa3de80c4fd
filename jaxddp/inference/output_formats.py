"""Formats of the files with a row for each image: predictions in CSV, JSON lines, Parquet and Kaggle's, and features.

Feature files are NumPy's .npz and Parquet. All are written in parts, so that they need little memory.
"""

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import choices, not_installed
from jaxddp.data.formats.array_files import as_input_errors
from jaxddp.data.formats.numpy_files import array_names, unpack_array
from jaxddp.data.images.header import parse_header
from jaxddp.data.labels import Labels
from jaxddp.data.source import Table
from jaxddp.inference.predictions import OutputRow

Item = TypeVar("Item")
PredictionFormat = Literal["csv", "jsonl", "parquet", "kaggle"]
_AT_ONCE = 4096
_THREADS = 16
FeatureFormat = Literal["npz", "parquet"]
FeatureRow = tuple[np.ndarray, Any]
"""The features of an image, float32[D], and its fault, or None."""
_BYTES_AT_ONCE = 1 << 24
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
    def has_labels(self) -> bool:
        """Whether the images have classes."""
        return bool(self.labels.ids)


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


def prediction_format(out: Path) -> PredictionFormat:
    """Return the format of a file of predictions from its suffix. Raises: InputError if no format has this suffix."""
    return _format_of(out, get_args(PredictionFormat)[:3], ", or give --format")


def feature_format(out: Path) -> FeatureFormat:
    """Return the format of a file of features from its suffix. Raises: InputError if no format has this suffix."""
    return _format_of(out, get_args(FeatureFormat), "")


def _format_of(out: Path, names: Sequence[str], advice: str) -> Any:
    form = next((name for name in names if out.suffix.lower() == f".{name}"), None)
    if form is None:
        raise InputError(f"{out}: its extension names no format; {choices(out.suffix[1:], names)}{advice}")
    return form


def parquet_library() -> tuple[Any, Any]:
    """Return the modules `pyarrow` and `pyarrow.parquet`. Raises: InputError if pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise InputError(f"format=parquet: {not_installed('pyarrow', 'parquet')}") from None
    return pyarrow, parquet


def prediction_bytes(
    form: PredictionFormat, columns: list[str], rows: Iterable[OutputRow], source: Table
) -> Iterator[bytes]:
    """Yield the bytes of the file in parts. `rows` has a row for each image of the source, in order."""
    write: dict[PredictionFormat, Callable[[list[str], Iterable[OutputRow], Table], Iterator[bytes]]] = {
        "csv": _csv,
        "jsonl": _json_lines,
        "parquet": _parquet,
        "kaggle": _kaggle,
    }
    return write[form](columns, rows, source)


def feature_bytes(form: FeatureFormat, columns: FeatureColumns, rows: Iterator[FeatureRow]) -> Iterator[bytes]:
    """Yield the bytes of the file in parts. `rows` has a row for each image, in order."""
    write: dict[FeatureFormat, Callable[[FeatureColumns, Iterator[FeatureRow]], Iterator[bytes]]]
    write = {"npz": _npz, "parquet": _feature_parquet}
    return write[form](columns, rows)


def read_features(path: Path) -> LabelledFeatures:
    """Read a .npz or .parquet file of `jaxddp features`.

    Raises:
        InputError: the file cannot be read, is no such file, or its images have no label or several.
    """
    with files.reading(path, _ADVICE, missing=f"no such file; {_ADVICE}"), files.open_regular(path) as file:
        arrays = (_read_npz if feature_format(path) == "npz" else _read_parquet)(path, file)
    if "labels" not in arrays:
        raise InputError(f"{path}: its images have no labels, which a probe needs; compute the features of a data set")
    features, labels = arrays["features"], arrays["labels"]
    if labels.ndim > 1:
        raise InputError(f"{path}: its images may have several labels, and a probe takes one")
    features = features.reshape(len(features), -1)
    usable = np.isfinite(features).all(1) & (labels >= 0)
    if not usable.any():
        raise InputError(f"{path}: has no image with features and a label; {_ADVICE}")
    network = str(arrays["network"]), str(arrays["layer"])
    class_ids = tuple(map(str, arrays["class_ids"]))
    omitted = int((~usable).sum())
    return LabelledFeatures(path, features[usable], labels[usable].astype(np.int64), class_ids, omitted, network)


def check_comparable(train: LabelledFeatures, val: LabelledFeatures) -> None:
    """Raise `InputError` if two files have features of different networks or layers, or other classes."""
    for of_train, of_val, kind in (
        (train.network[0], val.network[0], "network"),
        (train.network[1] or "the default", val.network[1] or "the default", "layer"),
        (f"{train.features.shape[1]} features", f"{val.features.shape[1]} features", "size"),
    ):
        if of_train != of_val:
            raise InputError(
                f"{val.path}: is of another {kind} than {train.path}: {of_val}, not {of_train}; compute both files "
                "with the same network and --layer"
            )
    if train.class_ids != val.class_ids:
        raise InputError(f"{val.path}: has other classes than {train.path}; give two splits of one data set")


def _npz(columns: FeatureColumns, rows: Iterator[FeatureRow]) -> Iterator[bytes]:
    sink, errors = _Sink(), list[str]()
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(columns.ids), *columns.shape)}
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(_member("features"), "w", force_zip64=True) as member:
            np.lib.format.write_array_header_2_0(member, header)
            for block in _blocks(rows, _rows_at_once(columns)):
                errors += [error or "" for _, error in block]
                member.write(b"".join(features.tobytes() for features, _ in block))
                yield sink.taken()
        arrays: dict[str, Any] = {"ids": _text(columns.ids), "errors": _text(errors)}
        if columns.has_labels:
            arrays["labels"] = columns.labels.values
            arrays |= {"class_ids": _text(columns.labels.ids), "class_names": _text(columns.labels.names)}
        arrays |= {"layer": np.array(columns.layer), "network": np.array(columns.network)}
        for name, array in arrays.items():
            with archive.open(_member(name), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
            yield sink.taken()
    yield sink.taken()


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{name}.npy", _EPOCH)


def _text(values: Sequence[str]) -> np.ndarray:
    return np.array(values, np.str_)


def _feature_parquet(columns: FeatureColumns, rows: Iterator[FeatureRow]) -> Iterator[bytes]:
    pyarrow, parquet = parquet_library()
    length = int(np.prod(columns.shape))
    several = columns.labels.several
    fields = [("id", pyarrow.string()), ("features", pyarrow.list_(pyarrow.float32(), length))]
    if columns.has_labels:
        fields.append(("label", pyarrow.list_(pyarrow.uint8()) if several else pyarrow.int32()))
    schema = pyarrow.schema([*fields, ("error", pyarrow.string())], {"jaxddp": json.dumps(_description(columns))})
    sink, done = _Sink(), 0
    with parquet.ParquetWriter(pyarrow.PythonFile(sink, "w"), schema) as writer:
        for block in _blocks(rows, _rows_at_once(columns)):
            some = slice(done, done := done + len(block))
            values = pyarrow.array(np.concatenate([features.ravel() for features, _ in block]))
            arrays = [columns.ids[some], pyarrow.FixedSizeListArray.from_arrays(values, length)]
            if columns.has_labels:
                labels = columns.labels.values[some]
                arrays.append(labels.tolist() if several else labels)
            arrays.append([error for _, error in block])
            table = [pyarrow.array(array, field.type) for array, field in zip(arrays, schema, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(table, schema=schema))
            yield sink.taken()
    yield sink.taken()


def _description(columns: FeatureColumns) -> dict[str, Any]:
    description: dict[str, Any] = {"layer": columns.layer, "network": columns.network, "shape": columns.shape}
    names = {"class_ids": columns.labels.ids, "class_names": columns.labels.names}
    return description | (names if columns.has_labels else {})


def _read_npz(path: Path, file: Any) -> dict[str, Any]:
    if not zipfile.is_zipfile(file):
        raise InputError(f"{path}: is no feature file; {_ADVICE}")
    with as_input_errors(path, _ADVICE):
        names = [name for name in array_names(path) if name not in ("ids", "errors")]
        arrays = {name: unpack_array(path, name) for name in names}
    _check_names(path, arrays)
    return arrays


def _read_parquet(path: Path, file: Any) -> dict[str, Any]:
    pyarrow, parquet = parquet_library()
    try:
        table = parquet.read_table(file)
        arrays: dict[str, Any] = files.parse_json((table.schema.metadata or {}).get(b"jaxddp", b"{}"), dict)
        if "features" in table.column_names:
            values = table["features"].combine_chunks()
            arrays["features"] = np.asarray(values.flatten(), np.float32).reshape(len(table), -1)
        if "label" in table.column_names:
            arrays["labels"] = np.array(table["label"].to_pylist())
    except (pyarrow.ArrowInvalid, ValueError) as error:
        raise InputError(f"{path}: is no feature file ({error}); {_ADVICE}") from None
    _check_names(path, arrays)
    return arrays


def _check_names(path: Path, arrays: dict[str, Any]) -> None:
    names = ("features", "layer", "network", *(("class_ids",) if "labels" in arrays else ()))
    if missing := [name for name in names if name not in arrays]:
        raise InputError(f"{path}: is no feature file: it has no {missing[0]}; {_ADVICE}")


def _csv(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    yield _csv_lines([columns])
    for some in _blocks(rows, _AT_ONCE):
        yield _csv_lines([row[column] for column in columns] for row in some)


def _csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _json_lines(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    return ((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)


def _parquet(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    pyarrow, parquet = parquet_library()
    kinds = {"probability": pyarrow.float32()}
    schema = pyarrow.schema([(name, kinds.get(name.split("_")[0], pyarrow.string())) for name in columns])
    file = io.BytesIO()
    with parquet.ParquetWriter(file, schema) as writer:
        for some in _blocks(rows, _AT_ONCE):
            writer.write_table(pyarrow.Table.from_pylist(list(some), schema=schema))
    yield file.getvalue()


def _kaggle(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    """Yield the submission file of the ImageNet localization challenge. Every box is the whole image.

    An unusable image has an empty prediction.
    """
    classes = [column for column in columns if column.startswith("class")]

    def line(index: int, row: OutputRow) -> tuple[object, str]:
        if row["error"] is not None:
            return row["id"], ""
        header = parse_header(source.read(index))
        box = f"0 0 {header.width - 1} {header.height - 1}"
        return row["id"], " ".join(f"{row[column]} {box}" for column in classes)

    yield _csv_lines([("ImageId", "PredictionString")])
    with ThreadPoolExecutor(_THREADS) as pool:
        for some in _blocks(enumerate(rows), _AT_ONCE):
            yield _csv_lines(pool.map(line, *zip(*some, strict=True)))


def _blocks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block


def _rows_at_once(columns: FeatureColumns) -> int:
    """Return the number of rows with at most 16 MiB of features, at least one."""
    return max(1, _BYTES_AT_ONCE // (4 * int(np.prod(columns.shape))))


class _Sink(io.RawIOBase):
    """A file that is only written, whose bytes are taken in parts."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        return len(part)

    def taken(self) -> bytes:
        """Return the bytes since the last call."""
        taken, self._parts = b"".join(self._parts), []
        return taken
