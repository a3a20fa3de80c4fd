"""Computes a row for each image of a table; an interrupted computation continues after its last batch."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.core.phases import moved
from jaxddp.core.wording import counted
from jaxddp.data.source import SourceTable
from jaxddp.inference.output_stream import BatchOutputs, images_at_once
from jaxddp.inference.partial_file import Partial
from jaxddp.inference.predictions import Row

Progress = Callable[[int, int], None]
"""A function that process 0 calls with the number of completed images, and the number of unusable ones among them."""


class RowCounts(NamedTuple):
    """The number of images in an output file."""

    images: int
    errors: int
    """The number of images that cannot be used."""


@contextmanager
def completed_rows(
    partial: Partial,
    table: SourceTable,
    peers: Peers,
    outputs: Callable[[SourceTable, int], Iterable[BatchOutputs]],
    rows_of: Callable[[int, BatchOutputs], Iterable[Row]],
    progress: Progress,
) -> Iterator[RowCounts]:
    """Complete the rows of a partial file. In the block, process 0 has the lock of the file.

    All processes enter the block together.

    Args:
        outputs: computes the outputs of a table, with a number of images on each device.
        rows_of: returns the rows of a batch, which have a column `error`. The first argument is the row in `table` of
            the batch's first image. Process 0 calls it.

    Raises:
        InputError: the file cannot be written, or the processes have different images.
    """
    count, at_once = len(table), images_at_once(len(table))
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
        yield RowCounts(count, errors)
        # Process 0 may write longer than `parallel.shutdown_timeout`, for which ended processes wait for it.
        peers.from_first("written rows", str)


def checked_rows(partial: Partial, count: int) -> Iterator[Row]:
    """Yield the rows of a partial file. Raises: InputError if their number is not `count`."""
    number = 0
    for row in partial.rows():
        number += 1
        moved()
        yield row
    if number != count:
        raise InputError(
            f"{partial.path}: {counted(number, 'row')} for {counted(count, 'image')}; remove the file and start again"
        )
