"""What becomes of the work directory of a job of `benchmarks/chaos.py`: removed, moved, replaced, covered, locked."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.hosts import SECONDS, run


@contextlib.contextmanager
def removed(workdir: Path) -> Iterator[None]:
    """As `rm -r` does, file by file, while files are still being written."""
    give_up = time.monotonic() + SECONDS
    while workdir.exists() and time.monotonic() < give_up:
        shutil.rmtree(workdir, ignore_errors=True)
    yield


@contextlib.contextmanager
def moved(workdir: Path) -> Iterator[None]:
    """Brought back at the end, unless the job was only about to begin, and has made another one."""
    elsewhere = workdir.with_name("elsewhere")
    workdir.rename(elsewhere)
    yield
    if workdir.exists():
        shutil.rmtree(elsewhere)
    else:
        elsewhere.rename(workdir)


@contextlib.contextmanager
def replaced(workdir: Path) -> Iterator[None]:
    """By a file."""
    with moved(workdir):
        workdir.write_text("")
        try:
            yield
        finally:
            workdir.unlink()


@contextlib.contextmanager
def covered(workdir: Path) -> Iterator[None]:
    """By another file system, as where a disk is mounted too late, or unmounted too early."""
    run(["mount", "-t", "tmpfs", "tmpfs", str(workdir)])
    try:
        yield
    finally:
        run(["umount", "--lazy", str(workdir)])


@contextlib.contextmanager
def read_only(workdir: Path) -> Iterator[None]:
    """For root too. What is open there stays writable."""
    beside = workdir.with_name("read-only")
    beside.mkdir()
    # What is written to meanwhile cannot be made so: it is prepared elsewhere.
    run(["mount", "--bind", str(workdir), str(beside)])
    try:
        run(["mount", "-o", "remount,bind,ro", str(beside)])
        run(["mount", "--bind", str(beside), str(workdir)])
        try:
            yield
        finally:
            run(["umount", "--lazy", str(workdir)])
    finally:
        run(["umount", "--lazy", str(beside)])


def check_gone(workdir: Path) -> None:
    """Raises: OSError; something was made where there was a work directory, which a later run would take for one."""
    if workdir.exists():
        held = sorted(str(place.relative_to(workdir)) for place in workdir.rglob("*"))
        raise FileExistsError(f"{workdir} was made again, with {held[:5]}")
