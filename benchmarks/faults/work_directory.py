"""Removes, moves, replaces, covers or locks the work directory of a job of `benchmarks/chaos.py`."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.hosts import TIMEOUT_SECONDS, run


@contextlib.contextmanager
def removed(workdir: Path) -> Iterator[None]:
    """Remove the directory file by file, as `rm -r` does, while the job still writes files."""
    give_up = time.monotonic() + TIMEOUT_SECONDS
    while workdir.exists() and time.monotonic() < give_up:
        shutil.rmtree(workdir, ignore_errors=True)
    yield


@contextlib.contextmanager
def moved(workdir: Path) -> Iterator[None]:
    """Move the directory. Move it back at the end, except if a starting job has created another directory."""
    elsewhere = workdir.with_name("elsewhere")
    workdir.rename(elsewhere)
    yield
    if workdir.exists():
        shutil.rmtree(elsewhere)
    else:
        elsewhere.rename(workdir)


@contextlib.contextmanager
def replaced(workdir: Path) -> Iterator[None]:
    """Replace the directory by a file."""
    with moved(workdir):
        workdir.write_text("")
        try:
            yield
        finally:
            workdir.unlink()


@contextlib.contextmanager
def covered(workdir: Path) -> Iterator[None]:
    """Mount another file system over the directory, as if a disk was mounted too late or unmounted too early."""
    run(["mount", "-t", "tmpfs", "tmpfs", str(workdir)])
    try:
        yield
    finally:
        run(["umount", "--lazy", str(workdir)])


@contextlib.contextmanager
def read_only(workdir: Path) -> Iterator[None]:
    """Make the directory read-only, also for root. Open files stay writable."""
    beside = workdir.with_name("read-only")
    beside.mkdir()
    # A mount with open files cannot become read-only, so the read-only mount is prepared elsewhere.
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
    """Raise OSError if the work directory was created again, where a later run would use it."""
    if workdir.exists():
        content = sorted(str(place.relative_to(workdir)) for place in workdir.rglob("*"))
        raise FileExistsError(f"{workdir} was created again, with {content[:5]}")
