"""A data set read once from end to end: which of its images cannot be used, and what else is odd about it."""

import os
import threading
import warnings
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Protocol

from jaxddp.curate.look import Look, look_at
from jaxddp.curate.report import CheckedSplit, CheckReport, Table
from jaxddp.errors import InputError

# Small enough that threads end together, large enough that handing them out is no work.
_CHUNK = 16
_AHEAD = 2
"""Chunks under way for each thread: what an image that takes long makes the others wait behind."""
_LEAST_THREADS = 8


class CheckProgress(Protocol):
    """Whoever wants to know how far the check has come."""

    def advance(self, looked: int, faults: int) -> None:
        """So many images have been looked at, and so many of them cannot be used."""
        ...

    def fault(self, line: str) -> None:
        """An image that cannot be used, and why."""
        ...


def check(
    tables: Mapping[str, Table], *, threads: int | None = None, progress: CheckProgress | None = None
) -> CheckReport:
    """Reads every image of every split once, and compares them all.

    Faults are told in the order of the rows, and the report is the same on any number of threads. No more encoded
    images are held than there are threads, and about 100 bytes a row.

    Args:
        tables: the splits by name, such as train and val, in the order in which duplicates are assigned.
        threads: by default twice the cores, since some of them wait for the disk; 8 at least.

    Raises:
        InputError: no split, or fewer than one thread.
    """
    if not tables:
        raise InputError("nothing to check: give at least one split")
    if threads is not None and threads < 1:
        raise InputError(f"threads {threads}: use at least 1")
    threads = threads or max(_LEAST_THREADS, 2 * (os.cpu_count() or 1))
    splits, looked, faults = [], 0, 0
    with warnings.catch_warnings():
        # Pillow warns of images that are near the limit of pixels; what is beyond it is a fault here.
        warnings.filterwarnings("ignore", "Image size .* exceeds limit")
        for name, table in tables.items():
            split = CheckedSplit(name, table)
            splits.append(split)
            with closing(_looks(table, threads)) as looks:
                for row, look in enumerate(looks):
                    split.add(row, look)
                    looked, faults = looked + 1, faults + (look.fault is not None)
                    if progress is not None:
                        if look.fault is not None:
                            progress.fault(f"{split.name_of(row)}: {look.fault}")
                        progress.advance(looked, faults)
    return CheckReport.of(splits)


def _looks(table: Table, threads: int) -> Generator[Look]:
    """A look at each row, in their order; closing it ends the threads after the image that each is at."""
    ended = threading.Event()

    def chunk(start: int) -> list[Look]:
        rows = range(start, min(start + _CHUNK, len(table)))
        return [look_at(table, row) for row in rows if not ended.is_set()]

    pool, under_way = ThreadPoolExecutor(threads), deque[Future[list[Look]]]()
    try:
        for start in range(0, len(table), _CHUNK):
            under_way.append(pool.submit(chunk, start))
            if len(under_way) > _AHEAD * threads:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)
