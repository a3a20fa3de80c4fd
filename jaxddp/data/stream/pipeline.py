"""The stream of one shard: threads read, verify and decode images into the arrays of the next batches.

Labels, masks, rows and epochs are computed from the order. The threads of a batch share one iterator over its images,
so a slow image holds up one thread, and a thread without an image begins with the next batch. The libraries that read,
decode and resize release Python's lock.
"""

import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from jaxddp.core.cores import num_cores
from jaxddp.core.errors import InputError
from jaxddp.data.batch import Batch
from jaxddp.data.order import Order, Shard, check_order, columns
from jaxddp.data.source import Substitutes
from jaxddp.data.stream.decode import Pixels, example_keys
from jaxddp.data.stream.workers import SharedArray, Task, load, run_in_worker

BATCHES_AHEAD = 2
"""The number of batches that are read and decoded ahead of their use; it limits the memory."""
FETCH_THREADS = 32
"""The number of threads for a store that is not on this machine: they wait for its answers most of the time."""
_AT_ONCE = 32
"""The largest number of images that a worker loads at once."""


@dataclass(frozen=True)
class Loading:
    """A batch while threads load its images."""

    batch: Batch
    """The batch, with padding 0 in its images."""
    places: list[int]
    """The places of the examples in the batch, without padding: b of B."""
    keys: np.ndarray
    """uint64[b, 2]; see `example_keys`."""
    rows: list[int]
    """The row whose image is read for each example: a substitute for an unusable image."""
    results: list[bool | Exception]
    """Whether each image was verified and is sound; an exception for an image that cannot be used."""
    left: Iterator[int]
    """The examples that no thread has begun with. All threads share the iterator."""
    shared: SharedArray | None
    """The images of the batch, if workers load them."""


@dataclass(frozen=True)
class Pipeline:
    """The stream of one shard of the batches of some steps."""

    table: Any
    """The `ExampleTable`, which imports this module."""
    order: Order
    """The order of the examples. Its seed is also the seed of the random crops."""
    pixels: Pixels
    steps: range
    shard: Shard
    substitutes: Substitutes | None = None
    verifies: bool = True
    """Whether images are verified to the last pixel, except for images that `table.verified` marks as sound."""
    workers: int = 0
    """The number of processes that load images; 0 if threads load them."""

    def batches(self) -> Generator[Batch]:
        """Return an iterator over the batches of the shard. Threads start to prepare batches immediately."""
        check_order(self.table, self.order, self.shard)
        store = self.table.pickled_store(self.workers) if self.workers else None
        threads = self.workers or (FETCH_THREADS if self.table.store.root is None else num_cores())
        pool, started = ThreadPoolExecutor(threads, "images"), deque[tuple[Loading, list[Future[None]]]]()

        def start(step: int) -> None:
            loading = self._loading(step)
            started.append((loading, [pool.submit(self._load_all, loading, store) for _ in range(threads)]))

        def end() -> None:
            # The threads end after their current images.
            for loading, _ in started:
                deque(loading.left, 0)
            pool.shutdown(wait=False, cancel_futures=True)
            self.table.verified.write_cache(self.shard.index)

        def consume() -> Generator[Any]:
            try:
                yield
                for step in self.steps:
                    if (ahead := step + BATCHES_AHEAD * self.steps.step) in self.steps:
                        start(ahead)
                    loading, futures = started[0]
                    for future in futures:
                        future.result()
                    batch = self._settled(step, loading)
                    started.popleft()
                    yield batch
            finally:
                finish()

        for step in self.steps[:BATCHES_AHEAD]:
            start(step)
        batches = consume()
        # It runs once: when the generator ends, is closed or is deleted, or at the exit of the program, before the
        # modules that it needs are gone.
        finish = weakref.finalize(batches, end)
        # Only a generator that was started has a `finally`.
        next(batches)
        return batches

    def _loading(self, step: int) -> Loading:
        batch = columns(self.table, self.order, step, self.shard)
        real = batch.mask > 0
        side, form = self.pixels.image_size, self.pixels.format
        shape = len(real), side, side, form.channels
        shared = SharedArray(shape, form.dtype) if self.workers else None
        image = np.empty(shape, form.dtype) if shared is None else shared.array
        image[~real] = 0
        keys = example_keys(self.order.seed, batch.epoch[real], batch.row[real] + self.order.first_row)
        rows = self._resolve(batch.row[real]).tolist()
        places = np.flatnonzero(real).tolist()
        left = iter(range(len(rows)))
        return Loading(batch._replace(image=image), places, keys, rows, [False] * len(rows), left, shared)

    def _load_all(self, loading: Loading, store: bytes | None) -> None:
        at_once = 1 if store is None else min(max(len(loading.rows) // self.workers, 1), _AT_ONCE)
        while taken := [*islice(loading.left, at_once)]:
            found = [None] if store is None else run_in_worker(self._task(loading, taken), store)
            for at, result in zip(taken, found, strict=True):
                loading.results[at] = result = self._load(loading, at) if result is None else result
                if isinstance(result, Exception) and not isinstance(result, InputError):
                    # The batch will raise it. If a store does not answer, other images would wait, too.
                    deque(loading.left, 0)

    def _task(self, loading: Loading, taken: list[int]) -> Task:
        rows = [loading.rows[at] for at in taken]
        table = replace(self.table.rows(np.array(rows)).without_labels(), store=None)
        verifies, places = [self._verifies(row) for row in rows], [loading.places[at] for at in taken]
        return Task(table, self.pixels, loading.keys[taken], verifies, loading.shared, places)

    def _verifies(self, row: int) -> bool:
        return self.verifies and not self.table.verified.sound[row]

    def _load(self, loading: Loading, at: int) -> bool | Exception:
        """Load one image into the batch; return its result (see `Loading.results`)."""
        row, image = loading.rows[at], loading.batch.image[loading.places[at]]
        try:
            return load(self.table, row, self.pixels, loading.keys[at], image, verifies=self._verifies(row))
        except Exception as error:
            return error

    def _settled(self, step: int, loading: Loading) -> Batch:
        """Return the batch after unusable images are substituted.

        Raises: the exception of an image that cannot be substituted.
        """
        batch, verified = loading.batch, self.table.verified
        for at, result in enumerate(loading.results):
            while isinstance(result, Exception):
                row = loading.rows[at]
                verified.sound[row] = False
                if self.substitutes is None or not isinstance(result, InputError):
                    raise result
                if row not in self.substitutes.faults:
                    self.substitutes.refuse(row, str(result))
                (loading.rows[at],) = self._resolve(batch.row[loading.places[at : at + 1]]).tolist()
                result = loading.results[at] = self._load(loading, at)
        verified.add([row for row, sound in zip(loading.rows, loading.results, strict=True) if sound], self.shard.index)
        if self.substitutes is None:
            return batch
        changed = (self._resolve(batch.row) != batch.row) & (batch.mask > 0)
        # In a batch that spans two epochs, only rows of the first are marked, so each row is marked once per epoch.
        changed &= self.shard.of(self.order.is_of_first_epoch(step), padding=False)
        return batch._replace(substituted=changed.astype(np.float32))

    def _resolve(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.substitutes is None else self.substitutes.resolve(rows)
