"""Writes a file with the features of each image of a table, on all devices of all processes."""

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.data.labels import labels_of
from jaxddp.data.source import SourceTable
from jaxddp.engine.predictions import Pool
from jaxddp.inference.completed_rows import Progress, RowCounts, checked_rows, completed_rows
from jaxddp.inference.features import feature_formats
from jaxddp.inference.features.feature_formats import FeatureColumns
from jaxddp.inference.output_stream import BatchOutputs
from jaxddp.inference.partial_file import Partial
from jaxddp.inference.predictions import Row
from jaxddp.inference.trained import TrainedRun
from jaxddp.overrides import flatten
from jaxddp.training.checkpoints.run_identity import MAY_CHANGE
from jaxddp.workdir.digests import checksums

_STORED = np.dtype("<f4")
_NOT_FINITE = "the features are not finite"


def write_features(
    run: TrainedRun,
    table: SourceTable,
    out: Path,
    form: feature_formats.Format,
    *,
    layer: str | None = None,
    pool: Pool = "mean",
    progress: Progress = lambda done, errors: None,
) -> RowCounts:
    """Write the features of every image, with ids, labels and faults; see `TrainedRun.features` and `FeatureColumns`.

    An interrupted computation is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete. Features are kept on disk until then, so the memory does not grow with the number
    of images.

    Raises:
        InputError: the file cannot be written, the network has no such layer, or the processes have different
            arguments.
    """
    feature_formats.check(form)
    peers = run.topology.peers
    peers.agree({"--out": str(out), "--format": form, "--layer": str(layer), "--pool": pool})
    _, row = run.layer_programs.features(layer, pool)
    # The first process writes the file.
    place = Path(peers.from_first("the file", lambda: str(files.check_out(out))))
    header: dict[str, str | int] = {"run": str(run.directory.resolve()), "step": run.step, "images": table.fingerprint}
    header |= {"layer": str(layer), "pool": pool, "settings": _digest(run.config), **checksums(run.state), "version": 1}
    partial = Partial(place, header, ["features", "error"])

    def rows_of(first: int, batch: BatchOutputs) -> Iterator[Row]:
        values = np.ascontiguousarray(batch.values, _STORED).reshape(batch.size, -1)
        for index, features in enumerate(values):
            error = batch.errors.get(batch.start + index)
            if error is None and not np.isfinite(features).all():
                error = _NOT_FINITE
            yield {"features": base64.b64encode(features.tobytes()).decode(), "error": error}

    with completed_rows(
        partial, table, peers, lambda rest, at_once: run.feature_stream(rest, layer, pool, at_once), rows_of, progress
    ) as counts:
        if peers.is_first:
            columns = FeatureColumns(
                ids=[str(table.record(row).id) for row in range(len(table))],
                labels=labels_of(table),
                shape=row.shape,
                layer=layer or "",
                network=f"{run.directory.resolve()} step {run.step}",
            )
            files.replace(place, feature_formats.content(form, columns, _decoded(checked_rows(partial, counts.images))))
            partial.remove()
    return counts


def _digest(config: Config) -> str:
    """Return a digest of the settings that features depend on: of the images, the network and the precision."""
    settings = {
        key: str(value)
        for key, value in flatten(config.to_dict()).items()
        if key.startswith(("data.", "model.", "train.precision")) and key not in MAY_CHANGE
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _decoded(rows: Iterator[Row]) -> Iterator[tuple[np.ndarray, str | None]]:
    """Yield the features, float32[…], and the fault of each image."""
    for row in rows:
        error = row["error"]
        yield np.frombuffer(base64.b64decode(str(row["features"])), _STORED), None if error is None else str(error)
