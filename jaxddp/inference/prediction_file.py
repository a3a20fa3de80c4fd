"""Writes a file with the predictions for each image of a source, on all devices of all processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.wording import as_text
from jaxddp.data.table import ExampleTable
from jaxddp.inference import prediction_formats
from jaxddp.inference.completed_rows import Progress, RowCounts, checked_rows, completed_rows
from jaxddp.inference.heat_map_files import HeatMapFiles
from jaxddp.inference.output_stream import BatchOutputs
from jaxddp.inference.partial_file import Partial
from jaxddp.inference.predictions import Predictions, Row, column_names
from jaxddp.inference.trained import TrainedRun
from jaxddp.workdir.digests import checksums


@dataclass(frozen=True)
class PredictionOutput:
    """The files that a prediction writes.

    Attributes:
        path: the file with a row for each image.
        form: the format of this file.
        top: the number of most probable classes of an image that are written; all classes if there are fewer.
        guard_formulas: whether to write an apostrophe before text that a spreadsheet would read as a formula.
        explain: a folder for a picture of each image with a heat map for its most probable class; see `HeatMapFiles`.
    """

    path: Path
    form: prediction_formats.Format
    top: int = 5
    guard_formulas: bool = False
    explain: Path | None = None


def write_predictions(
    run: TrainedRun,
    table: ExampleTable,
    output: PredictionOutput,
    progress: Progress = lambda done, errors: None,
) -> RowCounts:
    """Write the most probable classes of every image.

    An interrupted prediction is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete.

    Args:
        progress: see `Progress`.

    Raises:
        InputError: the file or the folder cannot be written, the network has no layer for heat maps, or the processes
            have different arguments.
    """
    out, form, explain = output.path, output.form, output.explain
    prediction_formats.check(form)
    peers = run.topology.peers
    options = {"--out": out, "--top": output.top, "--format": form, "--explain": explain}
    options |= {"--guard-formulas": output.guard_formulas}
    peers.agree({option: str(value) for option, value in options.items()})
    # The first process writes the files.
    place = Path(peers.from_first("the file", lambda: str(files.check_out(out))))
    pictures = None if explain is None else HeatMapFiles(explain, len(table))
    top = min(output.top, len(run.class_ids))
    header = {"run": str(run.directory.resolve()), "step": run.step, "top": top, "images": table.fingerprint}
    # Without `explain` the header is the same as in older releases, so that their unfinished files continue.
    header |= {} if explain is None else {"explain": str(explain.absolute())}
    partial = Partial(place, {**header, **checksums(run.state), "version": 1}, column_names(top))

    def rows_of(first: int, batch: BatchOutputs) -> Iterator[Row]:
        ids = [str(table.record(row).id) for row in range(first, first + batch.size)]
        faults = {row - batch.start: error for row, error in batch.errors.items()}
        probabilities = batch.values
        if pictures is not None:
            probabilities, maps, images = batch.values
            pictures.write(first, ids, images, maps, faults)
        return Predictions(ids, probabilities, run.class_ids, run.class_names, faults).rows(top)

    if pictures is not None:
        peers.from_first("the folder", pictures.create)
    outputs = run.stream if explain is None else run.explained_stream
    with completed_rows(partial, table, peers, outputs, rows_of, progress) as counts:
        if peers.is_first:
            rows = checked_rows(partial, counts.images)
            if output.guard_formulas:
                rows = ({column: as_text(cell) for column, cell in row.items()} for row in rows)
            files.replace(place, prediction_formats.content(form, column_names(top), rows, table))
            partial.remove()
    return counts
