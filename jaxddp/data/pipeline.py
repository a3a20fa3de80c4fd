"""One shard of a stream as a tf.data pipeline: a producer of names, a graph that makes pixels, a consumer of batches.

TensorFlow sees what names an image and a key, and gives back pixels. Labels, masks, rows and epochs never enter its
graph: the consumer computes them from the order and puts them beside the images. Nothing here has a state worth saving:
to go on after a bad image another stands in, and the pipeline starts anew at the step that met it.
"""

import itertools
import os
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxddp.data.batch import Batch
from jaxddp.data.images.decode import decodes, verified
from jaxddp.data.images.verify import verify
from jaxddp.data.images.windows import example_keys
from jaxddp.data.memory import keep_freed_memory
from jaxddp.data.order import Order
from jaxddp.data.reading import Reading, reading
from jaxddp.data.source import check_order, columns
from jaxddp.data.substitutes import Substitutes
from jaxddp.data.table import ExampleTable
from jaxddp.data.tensorflow_cpu import tf
from jaxddp.errors import InputError, Unreachable

PREFETCH_BATCHES = 2
"""How many finished batches wait for the consumer, beyond the one in the making: the bound of the stream's memory."""

Load = Callable[[Any, Any], Any]
"""From an encoded image, a string scalar, and a key, int64[2], to an image, uint8[S, S, 3], in TensorFlow ops."""

_SOUND: "weakref.WeakKeyDictionary[ExampleTable, np.ndarray]" = weakref.WeakKeyDictionary()
"""Which rows this process has read to their last pixel, bool[N]: no file is looked through twice."""


@dataclass(frozen=True)
class Pipeline:
    """One shard of some steps: what its producer, its consumer and its diagnosis need to agree on.

    Attributes:
        index, count: which shard of how many.
        seed: of the keys that `load` is given.
        load: makes an image of an encoded one.
        substitutes: what stands in for images that cannot be used; without it they end the stream.
        lost: what the producer saw of a store that is gone: of its errors TensorFlow hands on no more than a text.
    """

    table: ExampleTable
    order: Order
    steps: range
    index: int
    count: int
    seed: int
    image_size: int
    load: Load
    substitutes: Substitutes | None = None
    lost: list[Unreachable] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise InputError(f"image size {self.image_size}: use at least 1 pixel")
        check_order(self.table, self.order, self.index, self.count)

    def batches(self, threads: int | None) -> Generator[Batch]:
        """The shard's batches, made by so many threads; by default as many as the cores that this process may use."""
        way = reading(self.table)
        key, look = tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.bool)

        # Traced once: to start anew would else take longer than to read the batch.
        @tf.function(input_signature=(key, look, *way.signature), autograph=False)
        def load(key: Any, look: Any, *place: Any) -> Any:
            return self.load(verified(way.read(*place), look), key)

        def start(step: int) -> Iterator[np.ndarray]:
            return self._images(way, load, self.steps[self.steps.index(step) :], threads or _usable_cores())

        images = [start(self.steps[0])] if self.steps else []
        batches = self._consume(images, start)
        # To drop TensorFlow's iterator is to wait for its threads, one of which may be in Python, in `_produce`. Once
        # the interpreter has begun to end, that one never comes back: so the iterator is dropped just before, at last.
        weakref.finalize(batches, images.clear)
        return batches

    def _images(self, way: Reading, load: Any, steps: range, threads: int) -> Iterator[np.ndarray]:
        """The pixels of one shard's batches, uint8[b, S, S, 3], b being the number of its real examples."""
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        # Parallel over images, and not within one as well.
        options.threading.max_intra_op_parallelism = 1
        # Every degree of parallelism is stated here, so there is nothing to tune and no memory that grows by tuning.
        options.autotune.enabled = False
        signature = tuple(tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in load.input_signature)
        dataset = (
            tf.data.Dataset.from_generator(lambda: self._produce(way, steps), output_signature=signature)
            .unbatch()
            # More in the making than threads, because finished images wait in order behind a slow one.
            .map(load, num_parallel_calls=2 * threads, deterministic=True)
            .batch(self.order.batch_size // self.count)
            .prefetch(PREFETCH_BATCHES)
            .with_options(options)
        )
        return dataset.as_numpy_iterator()

    def _produce(self, way: Reading, steps: range) -> Iterator[tuple[np.ndarray, ...]]:
        batches = ((batch, *self._images_of(batch)) for batch in map(self._columns, steps))
        # What is fetched is asked for some batches before it is used.
        ahead, here = itertools.tee(batches)
        try:
            for (batch, real, rows), places in zip(here, way.batches(rows for _, _, rows in ahead), strict=True):
                keys = example_keys(self.seed, batch.epoch[real], batch.row[real])
                yield keys, ~self._sound[rows], *places
        except Unreachable as error:
            self.lost.append(error)
            raise

    def _consume(self, images: list[Any], start: Callable[[int], Iterator[np.ndarray]]) -> Generator[Batch]:
        try:
            for step in self.steps:
                batch = self._columns(step)
                while (pixels := self._next(images[0], batch)) is None:
                    images[0] = start(step)
                keep_freed_memory()
                yield self._with_images(step, batch, pixels)
        finally:
            images.clear()

    def _next(self, images: Iterator[np.ndarray], batch: Batch) -> np.ndarray | None:
        """The pixels of a batch's real examples; None after others were found to stand in for bad ones."""
        if not batch.mask.any():
            return np.zeros((0, self.image_size, self.image_size, 3), np.uint8)
        try:
            pixels = next(images)
        except (tf.errors.OpError, UnicodeDecodeError):
            # The second is TensorFlow failing to put the bytes of a file or of its path into its own message.
            # To look at each image again would only wait for the store once more.
            if self.lost:
                raise self.lost[0] from None
            found = False
            for row, fault in self._faults(batch):
                found = True
                if self.substitutes is None:
                    raise InputError(fault) from None
                self.substitutes.refuse(row, fault)
            if found:
                return None
            raise
        self._sound[self._images_of(batch)[1]] = True
        return pixels

    def _with_images(self, step: int, batch: Batch, pixels: np.ndarray) -> Batch:
        """The batch with its pixels, zeros where it is padded."""
        padding = np.zeros((len(batch.mask) - len(pixels), *pixels.shape[1:]), np.uint8)
        image = np.concatenate([pixels, padding]) if len(padding) else pixels
        if self.substitutes is None:
            return batch._replace(image=image)
        changed = (self.substitutes.resolve(batch.row) != batch.row) & (batch.mask > 0)
        # A batch that ends in the next epoch belongs to the figures of this one, which must not count a row twice.
        changed &= batch.epoch == self.order.epochs(step)[0]
        return batch._replace(image=image, substituted=changed.astype(np.float32))

    def _faults(self, batch: Batch) -> Iterator[tuple[int, str]]:
        """The rows of the batch whose images cannot be used, each with what is wrong."""
        for row in np.unique(self._images_of(batch)[1]).tolist():
            try:
                data = self.table.read(row)
            except InputError as error:
                yield row, str(error)
                continue
            try:
                verify(data)
                decodes(data)
            except InputError as error:
                yield row, f"{self.table.name(row)}: {error}"

    def _images_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(bool[B], which examples are real; int32[b], the rows whose images they get)."""
        real = batch.mask > 0
        rows = batch.row[real]
        return real, rows if self.substitutes is None else self.substitutes.resolve(rows)

    def _columns(self, step: int) -> Batch:
        return columns(self.table.label, self.order, step, self.index, self.count)

    @cached_property
    def _sound(self) -> np.ndarray:
        return _SOUND.setdefault(self.table, np.zeros(len(self.table), bool))


def _usable_cores() -> int:
    """The cores that this process may run on, which a scheduler or `taskset` may have made fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
