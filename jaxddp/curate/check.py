"""`jaxddp data check`: reads a data set once, and finds images that cannot be used or are unusual."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.threads import map_in_threads
from jaxddp.curate.check_report import CheckedSplit, CheckReport
from jaxddp.curate.image_findings import examine
from jaxddp.curate.progress_bar import ProgressBar
from jaxddp.data.source import SourceTable

_MIN_THREADS = 8


def check(
    sources: Mapping[str, SourceTable],
    *,
    refused: Sequence[str] = (),
    threads: int | None = None,
    progress: ProgressBar | None = None,
) -> CheckReport:
    """Read every image of every split once, and find images with the same content.

    Faults are reported in the order of the rows, and the report does not depend on the number of threads. The memory
    holds at most one encoded image for each thread, and about 100 bytes for each row.

    Args:
        sources: the tables of the splits by name, such as train and val. Of two equal images, the later is the
            duplicate.
        refused: messages about rows and files that were rejected when the splits were opened; the report lists them.
        threads: the number of threads; by default twice the number of cores, because threads wait for the disk, but at
            least 8.
        progress: the bar that shows the progress and prints the faults; None prints nothing.

    Raises: InputError if there is no split.
    """
    if not sources:
        raise InputError("nothing to check: give at least one split")
    threads = threads or max(_MIN_THREADS, 2 * (os.cpu_count() or 1))
    splits, num_examined, num_faulty = [], 0, 0
    with warnings.catch_warnings():
        # Pillow's warning of images with many pixels is not needed, because images above `MAX_PIXELS` are faults.
        warnings.filterwarnings("ignore", "Image size .* exceeds limit")
        for name, source in sources.items():
            splits.append(split := CheckedSplit(name, source))
            findings_of_rows = map_in_threads(partial(examine, source), range(len(source)), threads)
            with _sound_rows(source) as sound, closing(findings_of_rows):
                for row, findings in enumerate(findings_of_rows):
                    split.add(row, findings)
                    sound[row] = findings.fault is None and not findings.has_stray_bytes
                    num_examined, num_faulty = num_examined + 1, num_faulty + (findings.fault is not None)
                    if progress is not None:
                        if findings.fault is not None:
                            progress.print_fault(f"{split.name_of(row)}: {findings.fault}")
                        progress.advance(num_examined, num_faulty)
    return CheckReport(splits, refused)


@contextmanager
def _sound_rows(source: SourceTable) -> Iterator[np.ndarray]:
    """Yield bool[N] in which the block marks sound rows. The marks are saved for later runs, also after an error."""
    if source.verified is None:
        yield np.zeros(len(source), bool)
        return
    # Record the identity of each file before any image is read. If a file changes during the check, its identity is out
    # of date, and the next run verifies the file again.
    source.verified.check_local_files()
    try:
        yield source.verified.sound
    finally:
        source.verified.write_cache()
