"""`jaxddp data check`: reads a data set once, and finds images that cannot be used or are unusual."""

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
"""The number of pending rows for each thread, so the other threads have work while one image takes long."""
_LEAST_THREADS = 8

T = TypeVar("T")


def check(
    sources: Mapping[str, SourceTable],
    *,
    refused: Sequence[str] = (),
    threads: int | None = None,
    progress: ProgressBar | None = None,
) -> CheckReport:
    """Reads every image of every split once, and finds images with the same content.

    Faults are reported in the order of the rows, and the report does not depend on the number of threads. The memory
    holds at most one encoded image for each thread, and about 100 bytes for each row.

    Args:
        sources: the splits by name, such as train and val. Of two equal images, the later one is the duplicate.
        refused: the messages of rows and files that were rejected when the splits were opened, for the report.
        threads: by default twice the number of cores, since some threads wait for the disk; at least 8.
        progress: shows the progress and the faults.

    Raises: InputError if there is no split.
    """
    if not sources:
        raise InputError("nothing to check: give at least one split")
    threads = threads or max(_LEAST_THREADS, 2 * (os.cpu_count() or 1))
    splits, looked, faults = [], 0, 0
    with warnings.catch_warnings():
        # Pillow's warning of images with many pixels is not needed, because images above `MAX_PIXELS` are faults.
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
    """Yields bool[N], in which the block marks sound rows; they are cached for later runs, also if the block fails."""
    if source.verified is None:
        yield np.zeros(len(source), bool)
        return
    # The identities of files are taken before any image is read. So if a file changes during the check, the next run
    # verifies it again.
    source.verified.check_local_files()
    try:
        yield source.verified.sound
    finally:
        source.verified.write_cache()


def in_threads(work: Callable[[int], T], count: int, threads: int) -> Generator[T]:
    """Yields `work` of the rows 0, 1, ... in order; closing the generator ends the threads after their current row."""
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
