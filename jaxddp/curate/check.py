"""A data set read once from end to end: which of its images cannot be used, and what else is unusual."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.curate.check_report import CheckedSplit, CheckReport
from jaxddp.curate.look import look_at
from jaxddp.curate.progress_bar import ProgressBar
from jaxddp.data.source import SourceTable

_AHEAD = 32
"""Pending rows for each thread: how many the others can finish while one image takes long."""
_LEAST_THREADS = 8

T = TypeVar("T")


def check(
    sources: Mapping[str, SourceTable],
    *,
    refused: Sequence[str] = (),
    threads: int | None = None,
    progress: ProgressBar | None = None,
) -> CheckReport:
    """Reads every image of every split once, and compares them all.

    Faults are reported in the order of the rows, and the report is the same on any number of threads. At most one
    encoded image for each thread is in memory, and about 100 bytes for each row.

    Args:
        sources: the splits by name, such as train and val, in the order in which duplicates are assigned.
        refused: what their opening refused, which goes into the report.
        threads: by default twice the cores, since some of them wait for the disk; at least 8.

    Raises `InputError` for no split.
    """
    if not sources:
        raise InputError("nothing to check: give at least one split")
    threads = threads or max(_LEAST_THREADS, 2 * (os.cpu_count() or 1))
    splits, looked, faults = [], 0, 0
    with warnings.catch_warnings():
        # Pillow warns of images near its limit of pixels; images beyond the limit are faults here.
        warnings.filterwarnings("ignore", "Image size .* exceeds limit")
        for name, source in sources.items():
            splits.append(split := CheckedSplit(name, source))
            looks = in_threads(partial(look_at, source), len(source), threads)
            with _verifying(source) as sound, closing(looks):
                for row, look in enumerate(looks):
                    split.add(row, look)
                    sound[row] = look.fault is None and not look.stray
                    looked, faults = looked + 1, faults + (look.fault is not None)
                    if progress is not None:
                        if look.fault is not None:
                            progress.fault(f"{split.name_of(row)}: {look.fault}")
                        progress.advance(looked, faults)
    return CheckReport(splits, refused)


@contextmanager
def _verifying(source: SourceTable) -> Iterator[np.ndarray]:
    """Which rows are sound, bool[N], to be told in the block, also where it is interrupted; kept for later runs."""
    if source.verified is None:
        yield np.zeros(len(source), bool)
        return
    # Before any is read: a file that changes meanwhile is another one for the next run.
    source.verified.recall()
    try:
        yield source.verified.sound
    finally:
        source.verified.keep()


def in_threads(work: Callable[[int], T], count: int, threads: int) -> Generator[T]:
    """`work` of each row from 0 on, in their order; closing it ends the threads after their current row."""
    pool, pending = ThreadPoolExecutor(threads), deque[Future[T]]()
    try:
        for row in range(count):
            pending.append(pool.submit(work, row))
            if len(pending) > _AHEAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
