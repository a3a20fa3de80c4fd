"""Writes files with a row for each image of a table: predictions, with heat maps on request, or features.

All processes compute. An interrupted command continues, because completed rows are kept as JSON lines beside the
output file:

OUT.partial     {"run": …, "step": …, "images": …, …}     the run, the checkpoint and the images
                {"id": "cat.jpg", "class": "cat", …}       a row for each completed image
"""

import base64
import contextlib
import functools
import hashlib
import json
import logging
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jaxddp.core import files
from jaxddp.core.errors import InputError, as_text, counted
from jaxddp.core.phases import doing, moved
from jaxddp.data.batch import Batch
from jaxddp.data.opening import open_full_splits
from jaxddp.data.source import Table, labels_of
from jaxddp.data.table import ExampleTable
from jaxddp.engine import objective
from jaxddp.engine.predictions import Pool
from jaxddp.inference import predictions, trained
from jaxddp.mesh import Topology
from jaxddp.setup import resources, user_objects
from jaxddp.training.checkpoints.integrity import MAY_CHANGE
from jaxddp.workdir.claim import check_evaluation
from jaxddp.workdir.saved_state import recipe_of_run

_STORED = np.dtype("<f4")
_NOT_FINITE = "the features are not finite"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST = 100
_MOST_CLASSES = 100
_log = logging.getLogger("jaxddp.predictions")
OnProgress = Callable[[int, int], None]
"""A function that process 0 calls with the number of completed images, and the number of unusable ones among them."""


class RowFile:
    """An output file with a row for each image of a table, and the file beside it with the completed rows.

    One process at a time may write them. Process 0 of a job does.

    Args:
        header: identifies the output, beside the run and the images: the names of the "columns", among them "error",
            and other JSON values. The rows of a file with another header are not continued.

    Raises: InputError if `out` cannot be written.
    """

    def __init__(self, run: trained.TrainedRun, table: Table, out: Path, header: Mapping[str, Any]):
        self.out = Path(run.topology.peers.from_first("the file", lambda: str(files.check_out(out))))
        self.path = self.out.with_name(f"{self.out.name}.partial")
        identity = {**run.identity, "settings": _settings(run), "images": table.fingerprint}
        self._header = _line({**identity, **header, "version": 1})
        self._peers, self._table, self._columns = run.topology.peers, table, {*header["columns"]}

    def complete(
        self,
        outputs: Callable[..., Iterable[trained.BatchOutputs]],
        rows_of: Callable[[trained.BatchOutputs], Iterable[predictions.OutputRow]],
        write: Callable[[BinaryIO, Iterator[predictions.OutputRow]], None],
        progress: OnProgress,
    ) -> int:
        """Compute the rows that are not in the partial file yet, write the file, and return the number of errors.

        Args:
            outputs: computes the outputs of a table, with `at_once` images on each device.
            rows_of: returns the rows of a batch. Its images are rows of the whole table.
            write: writes the content of a file with these rows.

        Raises: InputError if the file cannot be written, or the processes have different images.
        """
        peers, count, at_once = self._peers, len(self._table), trained.images_at_once(len(self._table))
        with contextlib.ExitStack() as stack:

            def begin() -> int:
                with files.readable_errors(self.path):
                    stack.enter_context(files.locked(self.path, self.path, "give another --out", is_folder=False))
                return self._resume(at_once, count)

            done = peers.from_first("completed rows", begin)
            errors = sum(row["error"] is not None for row in self._rows()) if peers.is_first and done else 0
            rest = self._table.rows(np.arange(done, count)) if done else self._table
            for batch in outputs(rest, at_once=at_once) if done < count else ():
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

    def _rows(self, expected: int | None = None) -> Iterator[predictions.OutputRow]:
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


def _settings(run: trained.TrainedRun) -> str:
    """Return a digest of the settings of the images, of the networks and of the precision. The outputs depend on them.

    Those of weights are options, so two commands with the same weights may differ in them.
    """
    members = run.members if isinstance(run, trained.Ensemble) else (run,)
    flat = [item for member in members for item in member.config.flat().items()]
    parts, kept = ("data.", "model.", "train.precision", "eval.views"), MAY_CHANGE - {"eval.views"}
    settings = [(key, str(value)) for key, value in flat if key.startswith(parts) and key not in kept]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def write_predictions(
    run: trained.TrainedRun,
    table: ExampleTable,
    out: Path,
    form: predictions.PredictionFormat,
    *,
    top: int = 5,
    min_confidence: float | None = None,
    set_threshold: float | None = None,
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
        min_confidence: the class of an image is "unknown" if its probability is smaller.
        set_threshold: with it, the column `set` has the classes of at least this probability.
        guard_formulas: whether to write an apostrophe before text that a spreadsheet would read as a formula.
        explain: a folder for a picture of each image with a heat map for its most probable class; see `heat_map_path`.
        progress: see `OnProgress`.

    Raises:
        InputError: the file or the folder cannot be written, the network has no layer for heat maps, or the processes
            have different arguments; or the network predicts numbers, and an option needs classes.
    """
    peers, numbers = run.topology.peers, run.class_ids if run.signature.label_form == "numbers" else ()
    if numbers and (form == "kaggle" or (min_confidence, explain) != (None, None)):
        raise InputError(f"--format kaggle, --min-confidence, --explain: {run.directory} predicts numbers, not classes")
    if form == "parquet":
        predictions.parquet_library()
    options = {"out": out, "top": top, "format": form, "explain": explain, "guard-formulas": guard_formulas}
    options |= {"min-confidence": min_confidence, "coverage": set_threshold}
    peers.agree({f"--{name}": str(value) for name, value in options.items()})
    top = min(top, len(run.class_ids))
    columns = predictions.columns_of(top, sets=set_threshold is not None, numbers=numbers)

    def rows_of(batch: trained.BatchOutputs) -> Iterable[predictions.OutputRow]:
        ids = [str(table.record(row).id) for row in range(batch.start, batch.start + batch.size)]
        faults = {row - batch.start: error for row, error in batch.errors.items()}
        probabilities = batch.values
        if explain is not None:
            probabilities, maps, images = batch.values
            for row, (image_id, *picture) in enumerate(zip(ids, images, maps, strict=True)):
                if row not in faults:
                    _write_heat_map(heat_map_path(explain, len(table), batch.start + row, image_id), *picture)
        classes = run.class_ids, run.class_names
        found = predictions.Predictions(ids, probabilities, *classes, faults, run.signature.label_form)
        return found.rows(top, min_confidence or 0.0, set_threshold)

    def write(file: BinaryIO, rows: Iterator[predictions.OutputRow]) -> None:
        guarded = ({column: as_text(cell) for column, cell in row.items()} for row in rows)
        predictions.write_prediction_rows(file, form, columns, guarded if guard_formulas else rows, table)

    if explain is not None:
        peers.from_first("the folder", lambda: str(files.create(explain)))
    header = {"columns": [*columns], "min_confidence": min_confidence, "set_threshold": set_threshold}
    header["explain"] = str(explain and explain.absolute())
    outputs = run.stream if explain is None else run.explained_stream
    return RowFile(run, table, out, header).complete(outputs, rows_of, write, progress)


def write_features(
    run: trained.TrainedRun,
    table: Table,
    out: Path,
    form: predictions.FeatureFormat,
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
        predictions.parquet_library()
    run.topology.peers.agree({"--out": str(out), "--format": form, "--layer": str(layer), "--pool": pool})
    shape = run.feature_shape(layer, pool)

    def rows_of(batch: trained.BatchOutputs) -> Iterator[predictions.OutputRow]:
        values = np.ascontiguousarray(batch.values, _STORED).reshape(batch.size, -1)
        for row, features in enumerate(values, batch.start):
            error = batch.errors.get(row) or (None if np.isfinite(features).all() else _NOT_FINITE)
            yield {"features": base64.b64encode(features.tobytes()).decode(), "error": error}

    def write(file: BinaryIO, rows: Iterator[predictions.OutputRow]) -> None:
        ids = [str(table.record(row).id) for row in range(len(table))]
        network = f"{run.directory.resolve()} step {run.step}"
        columns = predictions.FeatureColumns(ids, labels_of(table), shape, layer or "", network)
        decoded = ((np.frombuffer(base64.b64decode(str(row["features"])), _STORED), row["error"]) for row in rows)
        predictions.write_feature_rows(file, form, columns, decoded)

    header = {"columns": ["features", "error"], "layer": str(layer), "pool": pool}
    outputs = functools.partial(run.feature_stream, layer=layer, pool=pool)
    return RowFile(run, table, out, header).complete(outputs, rows_of, write, progress)


def write_out_of_fold(runs: Sequence[Path], out: Path) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Write a CSV file with the prediction of each training example by the run whose fold it is in.

    The columns are those of `jaxddp predict` with all classes, but at most 100, with `label` and `fold`; `known_label`
    or `known_fold` if a number to predict has the name. The best checkpoint of each run predicts. Return the metrics of
    the runs over all these predictions, and over those of each fold.

    Args:
        runs: the work directories of the runs of all folds, in their order.

    Raises: InputError if a run, its data or the file cannot be read or written, or the classes of two runs differ.
    """
    topology, rows, parts = Topology.create(), list[predictions.OutputRow](), list[tuple[np.ndarray, ...]]()
    members = [trained.restore_run(run, "best", topology) for run in runs]
    trained.check_same_classes(members)
    splits = [open_full_splits(member.config.data) for member in members]
    for fold, (member, split) in enumerate(zip(members, splits, strict=True)):
        config, val = member.config, split["val"]
        shown = config.data.val_fold or fold
        of_run = check_evaluation(member.directory, config)
        if of_run.has_changed(config.data, split["train"], val.take(config.eval.limit or len(val))):
            fault = f"{member.directory}: the data have changed since, so it may have trained on images of fold {shown}"
            raise InputError(fault, advice="restore the data, or remove this folder and sweep again")
        with doing(f"predicting the images of fold {shown}"):
            found, labels, logits = member.predict(val), labels_of(val), member.logits(val)
        for row, cells in enumerate(found.rows(_MOST_CLASSES)):
            known = {"label": labels.text(row), "fold": shown}
            rows.append(cells | {f"known_{name}" if name in cells else name: known[name] for name in known})
        usable = np.isfinite(logits).all(1)
        parts.append((logits[usable], labels.values[usable]))
    columns = dict.fromkeys(rows[0], str)
    files.replace(out, lambda file: predictions.write_prediction_rows(file, "csv", columns, rows, splits[0]["val"]))
    config, user_object = members[0].config, user_objects.objects_of_hooks(recipe_of_run(runs[0]).hooks)
    data = resources.TrainingData.of(splits[0]["train"], config.data)
    _, loss = user_objects.losses_of(config, data, user_object)
    metrics = user_objects.metrics_of(config, data.labels, user_object)
    parts.append(tuple(map(np.concatenate, zip(*parts, strict=True))))
    *measured, whole = (metrics_of_logits(loss, metrics, *part) for part in parts)
    return whole, measured


def metrics_of_logits(
    loss: objective.ExampleLoss, metrics: Mapping[str, Any], outputs: np.ndarray, labels: np.ndarray
) -> dict[str, float]:
    """Return the loss and the metrics for logits or numbers, float32[N, K]."""
    logits = jnp.asarray(outputs)
    ones, zeros = jnp.ones(len(labels)), jnp.zeros(len(labels), jnp.int32)
    batch = Batch(None, jnp.asarray(labels), ones, zeros, zeros)
    measured = objective.Objective(cast(Any, None), loss, cast(Any, None), metrics)
    sums, sets = measured.sums(measured.columns(logits, batch, None), batch), objective.SetSums()
    contributions = objective.compute_contributions(metrics, logits, objective.targets(batch.label, logits), ones)
    sets.add(jax.tree.map(lambda each: each[None], contributions))
    return {**sums.means(), **objective.finish_metrics(metrics, sets.results())}


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
