"""Load images into the arrays of batches, in this process or in worker processes.

Python runs one thread at a time, for about 0.08 ms of each image, which limits a process to some 5,000 images per
second. With `data.workers`, each thread of a stream has a worker in its place: it sends the rows of a few images, and
the worker reads, verifies, decodes and writes them to the memory of the batch. A worker ends with its parent, because
its input ends then. An image that it cannot use is loaded again by the parent, which has the error and may warn.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from jaxddp.core.errors import InputError, JaxddpError, about
from jaxddp.data.images import sound_image
from jaxddp.data.stream.decode import Pixels

_idle = list["Worker"]()
"""The workers without a task. They are kept for later streams."""


def load(table: Any, row: int, pixels: Pixels, key: np.ndarray, image: np.ndarray, *, verifies: bool) -> bool:
    """Load the image of a row of an `ExampleTable` into `image`, [S, S, C].

    Returns whether the image was verified and is sound. Raises: InputError; Unreachable.
    """
    header = kept = None
    found = data = table.read(row)
    with about(table.name(row)):
        if table.digests is not None and (fault := table.digests.fault(row, data)):
            raise InputError(fault)
        if verifies:
            kept = pixels.keeping(data, key)
            header, found = sound_image(data, kept)
        image[:] = pixels(found, key, header, kept)
    # Stray bytes are removed at each reading.
    return verifies and found is data


class SharedArray:
    """An array that is mapped in another process when it is unpickled there, while this object exists."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        # It has no place in /dev/shm, which is small in many containers. macOS has no files in memory.
        make: Any = getattr(os, "memfd_create", None)
        self._file: Any = os.fdopen(make("images"), "w+b") if make else NamedTemporaryFile()  # noqa: SIM115
        self._place = f"/proc/{os.getpid()}/fd/{self._file.fileno()}" if make else self._file.name
        self.array = np.asarray(np.memmap(self._file, dtype, shape=shape))

    def __reduce__(self) -> Any:
        return np.memmap, (self._place, self.array.dtype, "r+", 0, self.array.shape)


@dataclass(frozen=True)
class Task:
    """n images that a worker loads into a batch."""

    table: Any
    """The `ExampleTable` of the n images, without its store."""
    pixels: Pixels
    keys: np.ndarray
    """uint64[n, 2]; see `example_keys`."""
    verifies: list[bool]
    batch: Any
    """The `SharedArray` of the batch, which is an array in the worker."""
    places: list[int]
    """The places of the images in the batch."""

    def run(self, store: Any) -> list[bool | None]:
        """Return whether each image was verified and is sound; None for an image that the parent has to load."""
        table, results = replace(self.table, store=store), list[bool | None]()
        for row, (place, key, verifies) in enumerate(zip(self.places, self.keys, self.verifies, strict=True)):
            try:
                results.append(load(table, row, self.pixels, key, self.batch[place], verifies=verifies))
            except Exception:
                results.append(None)
        return results


class Worker:
    """A process that runs tasks. One thread at a time may use it."""

    def __init__(self) -> None:
        # With -P, a file of the working directory, such as numbers.py, does not take the place of a module.
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        # In its own session, it gets no signal of a terminal: the parent may first save its state.
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self._store: bytes | None = None

    def run(self, task: Task, store: bytes) -> list[bool | None]:
        """Run a task on a pickled store, which is sent if it is not that of the last task. Raises: JaxddpError."""
        try:
            pickle.dump((None if store is self._store else store, task), self._process.stdin)
            self._process.stdin.flush()
            results = pickle.load(self._process.stdout)
        except (EOFError, OSError):
            code = self._process.wait()
            cause = signal.Signals(-code).name if code < 0 else f"code {code}"
            advice = "if the memory of this machine is full, set data.workers lower"
            raise JaxddpError(f"data.workers: process {self._process.pid} ended with {cause}; {advice}") from None
        self._store = store
        return results


def run_in_worker(task: Task, store: bytes) -> list[bool | None]:
    """Run a task in an idle or new worker; see `Worker.run`."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = Worker()
    try:
        results = worker.run(task, store)
    except JaxddpError:
        # A full memory may have ended others, too.
        _idle.clear()
        raise
    _idle.append(worker)
    return results


class _ParentWarns(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise InputError(record.getMessage())


def serve() -> None:
    """Run tasks from stdin until it ends, and write their results to stdout. It is the program of a worker."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("jaxddp").addHandler(_ParentWarns())
    results, store = os.fdopen(os.dup(1), "wb"), None
    # A library that prints does not disturb the results.
    os.dup2(2, 1)
    with suppress(EOFError, BrokenPipeError):
        while True:
            pickled, task = pickle.load(sys.stdin.buffer)
            store = store if pickled is None else pickle.loads(pickled)
            pickle.dump(task.run(store), results)
            results.flush()
