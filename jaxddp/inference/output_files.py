"""Writes files with a row for each image of a table: predictions, with heat maps on request, or features.

All processes compute. An interrupted command continues, because completed rows are kept as JSON lines beside the
output file:

OUT.partial     {"run": …, "step": …, "images": …, …}     the run, the checkpoint and the images
                {"id": "cat.jpg", "class": "cat", …}       a row for each completed image

Predictions are CSV, JSON lines, Parquet or Kaggle's format; features are NumPy's .npz or Parquet. Rows are written as
they come, so that they need little memory.
"""

import base64
import contextlib
import csv
import hashlib
import io
import json
import logging
import os
import re
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, get_args

import numpy as np
from PIL import Image

from jaxddp.config.values import flatten
from jaxddp.core import files
from jaxddp.core.errors import InputError, as_text, choices, counted, not_installed
from jaxddp.core.phases import moved
from jaxddp.data.formats.array_files import as_input_errors
from jaxddp.data.formats.numpy_files import unpack_array
from jaxddp.data.images.header import parse_header
from jaxddp.data.source import Labels, SourceTable, Table, labels_of
from jaxddp.data.table import ExampleTable
from jaxddp.engine.predictions import Pool
from jaxddp.inference import output_files as formats
from jaxddp.inference.predictions import OutputRow, Predictions, column_names
from jaxddp.inference.trained import BatchOutputs, TrainedRun, images_at_once
from jaxddp.setup.identity import checksums
from jaxddp.training.checkpoints.integrity import MAY_CHANGE

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


_STORED = np.dtype("<f4")
_NOT_FINITE = "the features are not finite"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST = 100
_log = logging.getLogger("jaxddp.predictions")
OnProgress = Callable[[int, int], None]
"""A function that process 0 calls with the number of completed images, and the number of unusable ones among them."""


class RowFile:
    """An output file with a row for each image of a table, and the file beside it with the completed rows.

    One process at a time may write them. Process 0 of a job does.

    Args:
        header: identifies the output, beside the run and the images. The rows of a file with another header are not
            continued.
        columns: the columns of each row, among them `error`.

    Raises:
        InputError: `out` cannot be written.
    """

    def __init__(
        self, run: TrainedRun, table: SourceTable, out: Path, header: Mapping[str, object], columns: Sequence[str]
    ):
        self.out = Path(run.topology.peers.from_first("the file", lambda: str(files.check_out(out))))
        self.path = self.out.with_name(f"{self.out.name}.partial")
        identity = {"run": str(run.directory.resolve()), "step": run.step, "images": table.fingerprint}
        self._header = _line({**identity, **header, **checksums(run.state), "version": 1})
        self._peers, self._table, self._columns = run.topology.peers, table, {*columns}

    def complete(
        self,
        outputs: Callable[[SourceTable, int], Iterable[BatchOutputs]],
        rows_of: Callable[[BatchOutputs], Iterable[OutputRow]],
        write: Callable[[BinaryIO, Iterator[OutputRow]], None],
        progress: OnProgress,
    ) -> int:
        """Compute the rows that are not in the partial file yet, write the file, and return the number of errors.

        Args:
            outputs: computes the outputs of a table, with a number of images on each device.
            rows_of: returns the rows of a batch. Its images are rows of the whole table.
            write: writes the content of a file with these rows.

        Raises:
            InputError: the file cannot be written, or the processes have different images.
        """
        peers, count, at_once = self._peers, len(self._table), images_at_once(len(self._table))
        with contextlib.ExitStack() as stack:

            def begin() -> str:
                stack.enter_context(self._locked())
                return str(self._resume(at_once, count))

            done = int(peers.from_first("completed rows", begin))
            errors = sum(row["error"] is not None for row in self._rows()) if peers.is_first and done else 0
            rest = self._table.rows(np.arange(done, count)) if done else self._table
            for batch in outputs(rest, at_once) if done < count else ():
                faults = {done + row: fault for row, fault in batch.errors.items()}
                batch = batch._replace(start=done + batch.start, errors=faults)
                errors += len(faults)
                if peers.is_first:
                    files.append(self.path, b"".join(map(_line, rows_of(batch))))
                    progress(batch.start + batch.size, errors)
            if peers.is_first:
                files.replace(self.out, lambda file: write(file, self._rows(count)))
                files.remove(self.path)
            # Process 0 may write longer than `parallel.shutdown_timeout`, for which ended processes wait for it.
            peers.from_first("written rows", str)
        return errors

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file for the block. Raises: InputError if another process has the lock or writing fails."""
        while True:
            with files.readable_errors(self.path):
                file = files.open_regular(self.path, "ab")
            with file:
                if not files.try_lock(file):
                    advice = "wait for it, or give another --out"
                    raise InputError(f"{self.path}: another command is writing there; {advice}")
                # Another command may have ended and removed the file after this process opened it.
                if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    yield
                    return

    def _resume(self, multiple: int, total: int) -> int:
        """Remove unusable last rows, and return the number of remaining rows: `total`, or a multiple of `multiple`.

        Raises: InputError if the file cannot be read or written.
        """
        # The file is truncated and not replaced, because the lock belongs to the open file. It is read line by line,
        # because the rows of features can be larger than the memory.
        with files.readable_errors(self.path), open(self.path, "r+b") as file:
            first = file.readline()
            ends = array("q", [len(first)])
            if first == self._header:
                for line in file:
                    if line.endswith(b"\n"):
                        ends.append(ends[-1] + len(line))
                whole = len(ends) - 1
                count = whole if whole == total else whole // multiple * multiple
                file.truncate(ends[count])
                return count
            if first:
                _log.warning(f"{self.path}: holds rows of other images or another checkpoint; they are computed again")
            file.truncate(0)
        files.append(self.path, self._header)
        return 0

    def _rows(self, expected: int | None = None) -> Iterator[OutputRow]:
        """Yield all rows, in order. Raises: InputError if a line is no row, or their number is not as expected."""
        with files.reading(self.path, "predict again"), files.open_regular(self.path) as file:
            next(file)
            number = 1
            for number, line in enumerate(file, 2):
                moved()
                try:
                    row = files.parse_json(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or row.keys() != self._columns:
                    excerpt = line[:60].decode(errors="replace").strip()
                    raise InputError(f"{self.path}:{number}: no row of predictions: {excerpt!r}; remove the file")
                yield row
        if expected is not None and number - 1 != expected:
            found = f"{counted(number - 1, 'row')} for {counted(expected, 'image')}"
            raise InputError(f"{self.path}: {found}; remove the file and start again")


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def write_predictions(
    run: TrainedRun,
    table: ExampleTable,
    out: Path,
    form: formats.PredictionFormat,
    *,
    top: int = 5,
    guard_formulas: bool = False,
    explain: Path | None = None,
    progress: OnProgress = lambda done, errors: None,
) -> int:
    """Write the most probable classes of every image, and return the number of images that cannot be used.

    An interrupted prediction is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete.

    Args:
        out: the file with a row for each image.
        top: the number of most probable classes of an image that are written; all classes if there are fewer.
        guard_formulas: whether to write an apostrophe before text that a spreadsheet would read as a formula.
        explain: a folder for a picture of each image with a heat map for its most probable class; see `heat_map_path`.
        progress: see `OnProgress`.

    Raises:
        InputError: the file or the folder cannot be written, the network has no layer for heat maps, or the processes
            have different arguments.
    """
    peers = run.topology.peers
    if form == "parquet":
        formats.parquet_library()
    options = {"out": out, "top": top, "format": form, "explain": explain, "guard-formulas": guard_formulas}
    peers.agree({f"--{name}": str(value) for name, value in options.items()})
    top = min(top, len(run.class_ids))
    columns = column_names(top)

    def rows_of(batch: BatchOutputs) -> Iterator[OutputRow]:
        ids = [str(table.record(row).id) for row in range(batch.start, batch.start + batch.size)]
        faults = {row - batch.start: error for row, error in batch.errors.items()}
        probabilities = batch.values
        if explain is not None:
            probabilities, maps, images = batch.values
            for row, (image_id, *picture) in enumerate(zip(ids, images, maps, strict=True)):
                if row not in faults:
                    _write_heat_map(heat_map_path(explain, len(table), batch.start + row, image_id), *picture)
        return Predictions(ids, probabilities, run.class_ids, run.class_names, faults).rows(top)

    def write(file: BinaryIO, rows: Iterator[OutputRow]) -> None:
        guarded = ({column: as_text(cell) for column, cell in row.items()} for row in rows)
        formats.write_prediction_rows(file, form, columns, guarded if guard_formulas else rows, table)

    if explain is not None:
        peers.from_first("the folder", lambda: str(files.create(explain)))
    header = {"top": top, "explain": str(explain and explain.absolute())}
    outputs = run.stream if explain is None else run.explained_stream
    return RowFile(run, table, out, header, columns).complete(outputs, rows_of, write, progress)


def write_features(
    run: TrainedRun,
    table: SourceTable,
    out: Path,
    form: formats.FeatureFormat,
    *,
    layer: str | None = None,
    pool: Pool = "mean",
    progress: OnProgress = lambda done, errors: None,
) -> int:
    """Write the features of every image, with ids, labels and faults; see `TrainedRun.features` and `FeatureColumns`.

    An interrupted computation is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete. Features are kept on disk until then, so the memory does not grow with the number
    of images.

    Returns: the number of images that cannot be used.

    Raises:
        InputError: the file cannot be written, the network has no such layer, or the processes have different
            arguments.
    """
    if form == "parquet":
        formats.parquet_library()
    run.topology.peers.agree({"--out": str(out), "--format": form, "--layer": str(layer), "--pool": pool})
    shape = run.feature_shape(layer, pool)

    def rows_of(batch: BatchOutputs) -> Iterator[OutputRow]:
        values = np.ascontiguousarray(batch.values, _STORED).reshape(batch.size, -1)
        for row, features in enumerate(values, batch.start):
            error = batch.errors.get(row) or (None if np.isfinite(features).all() else _NOT_FINITE)
            yield {"features": base64.b64encode(features.tobytes()).decode(), "error": error}

    def write(file: BinaryIO, rows: Iterator[OutputRow]) -> None:
        ids = [str(table.record(row).id) for row in range(len(table))]
        network = f"{run.directory.resolve()} step {run.step}"
        columns = formats.FeatureColumns(ids, labels_of(table), shape, layer or "", network)
        decoded = ((np.frombuffer(base64.b64decode(str(row["features"])), _STORED), row["error"]) for row in rows)
        formats.write_feature_rows(file, form, columns, decoded)

    # Features depend on the settings of the images, of the network and of the precision.
    flat = flatten(run.config.to_dict()).items()
    parts = ("data.", "model.", "train.precision")
    settings = {key: str(value) for key, value in flat if key.startswith(parts) and key not in MAY_CHANGE}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    header = {"layer": str(layer), "pool": pool, "settings": digest}
    return RowFile(run, table, out, header, ("features", "error")).complete(
        lambda rest, at_once: run.feature_stream(rest, layer, pool, at_once), rows_of, write, progress
    )


def heat_map_path(folder: Path, count: int, row: int, image_id: str) -> Path:
    """Return the path ROW-ID.png of an image's heat map.

    ROW is the number of the image from 0, so no two of `count` images have the same file. ID is the end of the image's
    id, in which characters other than ASCII letters, digits, "-" and "_" are replaced.
    """
    name = _UNSAFE.sub("_", image_id)[-_LONGEST:]
    return folder / f"{row:0{len(str(count - 1))}d}-{name}.png"


def _write_heat_map(path: Path, image: np.ndarray, heat: np.ndarray) -> None:
    """Write an image, uint8 or uint16 [H, W, C], with its heat map, float[H, W]. Raises: InputError."""
    from jaxddp.training.pictures import heat_map_over

    files.replace(path, lambda file: Image.fromarray(heat_map_over(image, heat)).save(file, "PNG"))
