"""Writes files with a row for each image of a table: predictions, with heat maps on request, or features.

All processes compute. An interrupted command continues, because completed rows are kept as JSON lines beside the
output file:

OUT.partial     {"run": …, "step": …, "images": …, …}     the run, the checkpoint and the images
                {"id": "cat.jpg", "class": "cat", …}       a row for each completed image
"""

import base64
import hashlib
import io
import json
import logging
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError
from jaxddp.core.files import try_lock
from jaxddp.core.phases import moved
from jaxddp.core.wording import as_text, counted
from jaxddp.data.labels import labels_of
from jaxddp.data.source import SourceTable
from jaxddp.data.table import ExampleTable
from jaxddp.engine.predictions import Pool
from jaxddp.inference.output_formats import (
    FeatureColumns,
    FeatureFormat,
    PredictionFormat,
    feature_bytes,
    parquet_library,
    prediction_bytes,
)
from jaxddp.inference.predictions import OutputRow, Predictions, column_names
from jaxddp.inference.trained import BatchOutputs, TrainedRun, images_at_once
from jaxddp.setup.identity import checksums
from jaxddp.training.checkpoints.integrity import MAY_CHANGE

_STORED = np.dtype("<f4")
_NOT_FINITE = "the features are not finite"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST = 100
_log = logging.getLogger("jaxddp.predictions")
OnProgress = Callable[[int, int], None]
"""A function that process 0 calls with the number of completed images, and the number of unusable ones among them."""


class RowCounts(NamedTuple):
    """The number of images in an output file."""

    images: int
    errors: int
    """The number of images that cannot be used."""


@dataclass(frozen=True)
class PredictionOutput:
    """The files that a prediction writes.

    Attributes:
        path: the file with a row for each image.
        form: the format of this file.
        top: the number of most probable classes of an image that are written; all classes if there are fewer.
        guard_formulas: whether to write an apostrophe before text that a spreadsheet would read as a formula.
        explain: a folder for a picture of each image with a heat map for its most probable class; see `heat_map_path`.
    """

    path: Path
    form: PredictionFormat
    top: int = 5
    guard_formulas: bool = False
    explain: Path | None = None


class Partial:
    """A file beside the output file with the completed rows. One process at a time may write the file.

    Args:
        out: the output file.
        header: identifies the prediction. The rows of a file with another header are removed.
        columns: the columns of each row.
    """

    def __init__(self, out: Path, header: Mapping[str, str | int], columns: Sequence[str]):
        self.path = out.with_name(f"{out.name}.partial")
        self._header, self._columns = _line(header), {*columns}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the file for the block. Raises: InputError if another process has the lock or writing fails."""
        while True:
            with files.readable_errors(self.path):
                file = files.open_regular(self.path, "ab")
            with file:
                if not try_lock(file):
                    advice = "wait for it, or give another --out"
                    raise InputError(f"{self.path}: another command is writing there; {advice}")
                # Another command may have ended and removed the file after this process opened it.
                if not self.path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    continue
                yield
                return

    def resume(self, multiple: int, total: int) -> int:
        """Remove unusable last rows, and return the number of remaining rows: `total`, or a multiple of `multiple`.

        Raises: InputError if the file cannot be read or written.
        """
        with files.reading(self.path, "remove it"), files.open_regular(self.path) as file:
            first = file.readline()
            # Line by line, because the rows of features can be larger than the memory.
            ends = array("q", [len(first)])
            for line in file if first == self._header else ():
                if line.endswith(b"\n"):
                    ends.append(ends[-1] + len(line))
        if first == self._header:
            whole = len(ends) - 1
            count = whole if whole == total else whole // multiple * multiple
            with files.readable_errors(self.path):
                os.truncate(self.path, ends[count])
            return count
        if first:
            _log.warning(f"{self.path}: holds rows of other images or of another checkpoint; they are computed again")
        # The file is truncated and not replaced, because the lock belongs to the open file.
        with files.readable_errors(self.path):
            os.truncate(self.path, 0)
        files.append(self.path, self._header)
        return 0

    def append(self, rows: Iterable[OutputRow]) -> None:
        """Append the rows of the next images. Raises: InputError if the file cannot be written."""
        files.append(self.path, b"".join(map(_line, rows)))

    def rows(self) -> Iterator[OutputRow]:
        """Yield all rows, in order. Raises: InputError if a line is not a row."""
        with files.reading(self.path, "predict again"), files.open_regular(self.path) as file:
            next(file)
            for number, line in enumerate(file, 2):
                try:
                    row = files.parse_json(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or row.keys() != self._columns:
                    excerpt = line[:60].decode(errors="replace").strip()
                    raise InputError(f"{self.path}:{number}: no row of predictions: {excerpt!r}; remove the file")
                yield row

    def remove(self) -> None:
        """Remove the file, once the output file is written. Raises: InputError."""
        files.remove(self.path)


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def write_predictions(
    run: TrainedRun,
    table: ExampleTable,
    output: PredictionOutput,
    progress: OnProgress = lambda done, errors: None,
) -> RowCounts:
    """Write the most probable classes of every image.

    An interrupted prediction is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete.

    Args:
        progress: see `OnProgress`.

    Raises:
        InputError: the file or the folder cannot be written, the network has no layer for heat maps, or the processes
            have different arguments.
    """
    form, explain, peers = output.form, output.explain, run.topology.peers
    if form == "parquet":
        parquet_library()
    options = {"--out": output.path, "--top": output.top, "--format": form, "--explain": explain}
    peers.agree({name: str(value) for name, value in {**options, "--guard-formulas": output.guard_formulas}.items()})
    top = min(output.top, len(run.class_ids))
    columns = column_names(top)

    def rows_of(first: int, batch: BatchOutputs) -> Iterator[OutputRow]:
        ids = [str(table.record(row).id) for row in range(first, first + batch.size)]
        faults = {row - batch.start: error for row, error in batch.errors.items()}
        probabilities = batch.values
        if explain is not None:
            probabilities, maps, images = batch.values
            for row, (image_id, *picture) in enumerate(zip(ids, images, maps, strict=True)):
                if row not in faults:
                    _write_heat_map(heat_map_path(explain, len(table), first + row, image_id), *picture)
        return Predictions(ids, probabilities, run.class_ids, run.class_names, faults).rows(top)

    def content(rows: Iterator[OutputRow]) -> Iterator[bytes]:
        guarded = ({column: as_text(cell) for column, cell in row.items()} for row in rows)
        return prediction_bytes(form, columns, guarded if output.guard_formulas else rows, table)

    if explain is not None:
        peers.from_first("the folder", lambda: str(files.create(explain)))
    header = {"top": top, "explain": str(explain and explain.absolute())}
    outputs = run.stream if explain is None else run.explained_stream
    return _complete(run, table, output.path, header, columns, outputs, rows_of, content, progress)


def write_features(
    run: TrainedRun,
    table: SourceTable,
    out: Path,
    form: FeatureFormat,
    *,
    layer: str | None = None,
    pool: Pool = "mean",
    progress: OnProgress = lambda done, errors: None,
) -> RowCounts:
    """Write the features of every image, with ids, labels and faults; see `TrainedRun.features` and `FeatureColumns`.

    An interrupted computation is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete. Features are kept on disk until then, so the memory does not grow with the number
    of images.

    Raises:
        InputError: the file cannot be written, the network has no such layer, or the processes have different
            arguments.
    """
    if form == "parquet":
        parquet_library()
    run.topology.peers.agree({"--out": str(out), "--format": form, "--layer": str(layer), "--pool": pool})
    _, shape_of_row = run.layer_programs.features(layer, pool)

    def rows_of(_: int, batch: BatchOutputs) -> Iterator[OutputRow]:
        values = np.ascontiguousarray(batch.values, _STORED).reshape(batch.size, -1)
        for row, features in enumerate(values, batch.start):
            error = batch.errors.get(row) or (None if np.isfinite(features).all() else _NOT_FINITE)
            yield {"features": base64.b64encode(features.tobytes()).decode(), "error": error}

    def content(rows: Iterator[OutputRow]) -> Iterator[bytes]:
        columns = FeatureColumns(
            ids=[str(table.record(row).id) for row in range(len(table))],
            labels=labels_of(table),
            shape=shape_of_row.shape,
            layer=layer or "",
            network=f"{run.directory.resolve()} step {run.step}",
        )
        decoded = ((np.frombuffer(base64.b64decode(str(row["features"])), _STORED), row["error"]) for row in rows)
        return feature_bytes(form, columns, decoded)

    def outputs(rest: SourceTable, at_once: int) -> Iterable[BatchOutputs]:
        return run.feature_stream(rest, layer, pool, at_once)

    header = {"layer": str(layer), "pool": pool, "settings": _digest(run.config)}
    return _complete(run, table, out, header, ["features", "error"], outputs, rows_of, content, progress)


def _complete(
    run: TrainedRun,
    table: SourceTable,
    out: Path,
    header: Mapping[str, str | int],
    columns: Sequence[str],
    outputs: Callable[[SourceTable, int], Iterable[BatchOutputs]],
    rows_of: Callable[[int, BatchOutputs], Iterable[OutputRow]],
    content: Callable[[Iterator[OutputRow]], Iterator[bytes]],
    progress: OnProgress,
) -> RowCounts:
    """Compute the rows that are not in the partial file of `out` yet, and write `out`. Process 0 writes.

    Args:
        header: identifies the output, beside the run and the images.
        outputs: computes the outputs of a table, with a number of images on each device.
        rows_of: returns the rows of a batch, which have a column `error`. The first argument is the row in `table` of
            the batch's first image.
        content: returns the bytes of the file with these rows.

    Raises:
        InputError: the file cannot be written, or the processes have different images.
    """
    peers, count, at_once = run.topology.peers, len(table), images_at_once(len(table))
    out = Path(peers.from_first("the file", lambda: str(files.check_out(out))))
    identity = {"run": str(run.directory.resolve()), "step": run.step, "images": table.fingerprint}
    partial = Partial(out, {**identity, **header, **checksums(run.state), "version": 1}, columns)
    with ExitStack() as stack:

        def begin() -> str:
            stack.enter_context(partial.lock())
            return str(partial.resume(at_once, count))

        done = int(peers.from_first("completed rows", begin))
        errors = sum(row["error"] is not None for row in partial.rows()) if peers.is_first and done else 0
        rest = table.rows(np.arange(done, count)) if done else table
        for batch in outputs(rest, at_once) if done < count else ():
            first = done + batch.start
            errors += len(batch.errors)
            if peers.is_first:
                partial.append(rows_of(first, batch))
                progress(first + batch.size, errors)
        if peers.is_first:
            files.replace(out, content(_checked(partial, count)))
            partial.remove()
        # Process 0 may write longer than `parallel.shutdown_timeout`, for which ended processes wait for it.
        peers.from_first("written rows", str)
    return RowCounts(count, errors)


def _checked(partial: Partial, count: int) -> Iterator[OutputRow]:
    """Yield the rows of a partial file. Raises: InputError if their number is not `count`."""
    number = 0
    for number, row in enumerate(partial.rows(), 1):  # noqa: B007
        moved()
        yield row
    if number != count:
        raise InputError(
            f"{partial.path}: {counted(number, 'row')} for {counted(count, 'image')}; remove the file and start again"
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

    file = io.BytesIO()
    Image.fromarray(heat_map_over(image, heat)).save(file, "PNG")
    files.replace(path, file.getvalue())


def _digest(config: Config) -> str:
    """Return a digest of the settings that features depend on: of the images, the network and the precision."""
    settings = {
        key: str(value)
        for key, value in flatten(config.to_dict()).items()
        if key.startswith(("data.", "model.", "train.precision")) and key not in MAY_CHANGE
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
