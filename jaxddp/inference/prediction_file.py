"""Writes a file with the predictions for each image of a source, on all devices of all processes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import as_text, counted
from jaxddp.data.table import ExampleTable
from jaxddp.inference import prediction_formats
from jaxddp.inference.partial_file import Partial
from jaxddp.inference.prediction_stream import images_at_once
from jaxddp.inference.predictions import Predictions, Row, column_names
from jaxddp.inference.trained import TrainedRun
from jaxddp.workdir.digests import checksums


class PredictionCounts(NamedTuple):
    """The number of images in a prediction file."""

    images: int
    errors: int
    """The number of images that cannot be used."""


def write_predictions(
    run: TrainedRun,
    table: ExampleTable,
    out: Path,
    form: prediction_formats.Format,
    top: int = 5,
    progress: Callable[[int, int], None] = lambda done, errors: None,
    *,
    guard_formulas: bool = False,
) -> PredictionCounts:
    """Write the `top` most probable classes of every image, or all classes if there are fewer.

    An interrupted prediction is continued. The file has the same bytes on any number of devices and processes. It
    exists only when it is complete.

    Args:
        guard_formulas: whether to write an apostrophe before text that a spreadsheet would read as a formula.
        progress: a function that process 0 calls with the number of completed images, and the number of unusable images
            among them.

    Raises:
        InputError: the file cannot be written, or the processes have different arguments.
    """
    prediction_formats.check(form)
    peers = run.topology.peers
    peers.agree({"--out": str(out), "--top": str(top), "--format": form, "--guard-formulas": str(guard_formulas)})
    # The first process writes the file.
    place = Path(peers.from_first("the file", lambda: str(files.check_out(out))))
    count, at_once, top = len(table), images_at_once(len(table)), min(top, len(run.class_ids))
    header = {"run": str(run.directory.resolve()), "step": run.step, "top": top, "images": table.fingerprint}
    partial = Partial(place, {**header, **checksums(run.state), "version": 1}, column_names(top))
    with ExitStack() as stack:

        def begin() -> str:
            stack.enter_context(partial.lock())
            return str(partial.resume(at_once, count))

        done = int(peers.from_first("completed rows", begin))
        errors = sum(row["error"] is not None for row in partial.rows()) if peers.is_first and done else 0
        rest = table.rows(np.arange(done, count)) if done else table
        for batch in run.stream(rest, at_once) if done < count else ():
            first, number = done + batch.start, len(batch.probabilities)
            errors += len(batch.errors)
            if peers.is_first:
                ids = [str(table.record(row).id) for row in range(first, first + number)]
                faults = {row - batch.start: error for row, error in batch.errors.items()}
                predictions = Predictions(ids, batch.probabilities, run.class_ids, run.class_names, faults)
                partial.append(predictions.rows(top))
                progress(first + number, errors)
        if peers.is_first:
            rows = _check_count(partial.rows(), count, partial.path)
            if guard_formulas:
                rows = ({column: as_text(cell) for column, cell in row.items()} for row in rows)
            files.replace(place, prediction_formats.content(form, column_names(top), rows, table))
            partial.remove()
    return PredictionCounts(count, errors)


def _check_count(rows: Iterator[Row], count: int, path: Path) -> Iterator[Row]:
    """Yield the rows. Raises: InputError if their number is not `count`."""
    number = 0
    for row in rows:
        number += 1
        yield row
    if number != count:
        raise InputError(
            f"{path}: {counted(number, 'row')} for {counted(count, 'image')}; remove the file and predict again"
        )
