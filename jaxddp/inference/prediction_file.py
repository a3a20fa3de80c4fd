"""The images of a source become a file of predictions, each once and in order, on all devices of all processes."""

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
    """What was written."""

    images: int
    errors: int
    """Images that cannot be used."""


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
    """Write the `top` classes of every image, or all classes if there are fewer; go on where a killed one stopped.

    The file is the same, byte for byte, on any number of devices and processes, and it is there when it is whole.

    Args:
        guard_formulas: whether CSV has an apostrophe before what a spreadsheet would take for a formula.
        progress: told by the first process how many images were answered, and how many of them cannot be used.

    Raises:
        InputError: the file cannot be written, or the processes differ in what they are asked.
    """
    prediction_formats.check(form)
    peers = run.topology.peers
    peers.agree({"--out": str(out), "--top": str(top), "--format": form, "--guard-formulas": str(guard_formulas)})
    # The first process writes it.
    place = Path(peers.from_first("the file", lambda: str(files.check_out(out))))
    count, at_once, top = len(table), images_at_once(len(table)), min(top, len(run.class_ids))
    asked = {"run": str(run.directory.resolve()), "step": run.step, "top": top, "images": table.fingerprint}
    partial = Partial(place, {**asked, **checksums(run.state), "version": 1}, column_names(top))
    with ExitStack() as held:

        def begin() -> str:
            held.enter_context(partial.held())
            return str(partial.resume(at_once, count))

        done = int(peers.from_first("answers so far", begin))
        errors = sum(row["error"] is not None for row in partial.rows()) if peers.is_first and done else 0
        rest = table.rows(np.arange(done, count)) if done else table
        for answers in run.answers(rest, at_once) if done < count else ():
            first, number = done + answers.start, len(answers.probabilities)
            errors += len(answers.errors)
            if peers.is_first:
                ids = [str(table.record(row).id) for row in range(first, first + number)]
                own = {row - answers.start: error for row, error in answers.errors.items()}
                found = Predictions(ids, answers.probabilities, run.class_ids, run.class_names, own)
                partial.append(found.rows(top))
                progress(first + number, errors)
        if peers.is_first:
            rows = _all(partial.rows(), count, partial.path)
            if guard_formulas:
                rows = ({column: as_text(cell) for column, cell in row.items()} for row in rows)
            files.replace(place, prediction_formats.content(form, column_names(top), rows, table))
            partial.remove()
    return PredictionCounts(count, errors)


def _all(rows: Iterator[Row], count: int, path: Path) -> Iterator[Row]:
    """The rows. Raises: InputError; they are not so many."""
    found = 0
    for row in rows:
        found += 1
        yield row
    if found != count:
        raise InputError(
            f"{path}: {counted(found, 'answer')} for {counted(count, 'image')}; remove the file and predict again"
        )
