"""A tf.data pipeline for one shard: a producer of file names, a graph that decodes images, and a consumer.

The graph takes file names and keys, and returns pixels. It is traced once for equal settings. The consumer computes
labels, masks, rows and epochs from the order, and adds them to the pixels. The pipeline has no state between batches.
After an unusable image is substituted, the pipeline starts again at the step with that image.
"""

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxddp.core.errors import InputError, Unreachable, about
from jaxddp.core.threads import local_cores, map_in_threads
from jaxddp.data.batch import Batch
from jaxddp.data.faults import pass_faults_to
from jaxddp.data.images import sound_image
from jaxddp.data.order import Order, Shard, check_order, columns
from jaxddp.data.source import Substitutes
from jaxddp.data.stream.decode import Pixels, check_decoding, example_keys
from jaxddp.data.stream.tensorflow_cpu import keep_freed_memory, tf

MOST_GRAPHS = 16
REFUSED, SOUND, STRAY = range(3)
"""The verdicts on an image; see `pixel_graph`."""
PREFETCH_BATCHES = 2
"""The largest number of finished batches in the queue; it limits the memory."""
FETCH_THREADS = 32
"""The number of images that are fetched concurrently from a store that the graph cannot read."""
BATCHES_AHEAD = 2
"""The number of batches of encoded images that are fetched before they are decoded."""
Images = Iterator[tuple[np.ndarray, np.ndarray]]
"""Batches of pixels and verdicts.

For a rejected image, the graph returns black pixels. It raises no error, because every thread would print a traceback.
"""
_NO_IMAGES = np.zeros(0), np.zeros(0, np.int32)


@functools.lru_cache(maxsize=MOST_GRAPHS)
def pixel_graph(read: Callable[[Any, Any], Any] | None, pixels: Pixels) -> Any:
    """Return a graph function (key, verifies, digest, *place) -> (pixels, verdict).

    The arguments are an int64[2] key; whether to verify the image; its expected SHA-256, empty to accept any; and the
    place. The verdict is `REFUSED`; `SOUND`; or `STRAY` if the image is sound after the removal of stray bytes.

    Args:
        read: the result of `Store.in_graph`: a function of `place`, which is (path, offset). If `read` is None, `place`
            is the encoded image.
    """
    places = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)][: 2 if read else 1]
    arguments = tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.string)

    @tf.function(input_signature=(*arguments, *places), autograph=False)
    def load(key: Any, verifies: Any, digest: Any, *place: Any) -> Any:
        data = read(*place) if read else place[0]
        verified = functools.partial(tf.numpy_function, _verified, [data, verifies, digest], (tf.string, tf.int32))
        is_checked = verifies | (tf.strings.length(digest) > 0)
        image, verdict = tf.cond(is_checked, lambda: tuple(verified()), lambda: (data, tf.constant(SOUND)))
        image, verdict = tf.ensure_shape(image, []), tf.ensure_shape(verdict, [])
        shape = pixels.image_size, pixels.image_size, pixels.format.channels
        black = functools.partial(tf.zeros, shape, pixels.format.dtype)
        return tf.cond(verdict == REFUSED, black, lambda: pixels(image, key)), verdict

    return load


def _verified(data: bytes, verifies: bool, digest: bytes) -> tuple[bytes, np.int32]:
    """Return the bytes to decode and the verdict on an encoded image; see `pixel_graph`."""
    try:
        if digest and hashlib.sha256(data).digest() != digest:
            raise InputError("another image than that of the manifest")
        image = sound_image(data)[1] if verifies else data
    except InputError:
        return b"", np.int32(REFUSED)
    return image, np.int32(SOUND if image is data else STRAY)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline for one shard of the batches of some steps."""

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
    failures: list[Exception] = field(default_factory=list)
    """The exception that ended the producer. It is not passed to TensorFlow, which would print its traceback."""

    def batches(self) -> Generator[Batch]:
        """Return an iterator over the batches of the shard. Threads start to prepare batches immediately."""
        check_order(self.table, self.order, self.shard)
        images = [self._images(self.steps[0])] if self.steps else []
        batches = self._consume(images)
        # Deletion of TensorFlow's iterator waits for its threads, one of which runs Python code in `_produce`. During
        # the shutdown of the interpreter, that thread never returns, so the iterator must be deleted before.
        weakref.finalize(batches, self._end, images)
        return batches

    def _images(self, first: int) -> Any:
        """Yield (pixels, [b, S, S, C], verdicts, int32[b]) of the b examples of each batch from a step on.

        There is no padding.
        """
        load, steps = pixel_graph(self.table.store.in_graph(), self.pixels), self.steps[self.steps.index(first) :]
        threads, options = len(local_cores()), tf.data.Options()
        options.threading.private_threadpool_size = threads
        # Images are decoded in parallel, each by one thread.
        options.threading.max_intra_op_parallelism = 1
        # Autotuning would increase the memory, so every degree of parallelism is set here.
        options.autotune.enabled = False
        signature = tuple(tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in load.input_signature)
        dataset = (
            tf.data.Dataset.from_generator(lambda: self._produce(steps), output_signature=signature)
            .unbatch()
            # There are more calls than threads, because the order is kept: finished images wait for a slow image.
            .map(load, num_parallel_calls=2 * threads, deterministic=True)
            .batch(self.shard.examples(self.order.batch_size))
            .prefetch(PREFETCH_BATCHES)
            .with_options(options)
        )
        return dataset.as_numpy_iterator()

    def _produce(self, steps: range) -> Iterator[tuple[np.ndarray, ...]]:
        is_in_graph, digests = self.table.store.in_graph() is not None, self.table.digests
        rows_ahead = (row for step in steps for row in self._images_of(self._columns(step))[1].tolist())
        ahead = -(-BATCHES_AHEAD * self.shard.examples(self.order.batch_size) // FETCH_THREADS)
        fetched = map_in_threads(self.table.read, rows_ahead, FETCH_THREADS, ahead=ahead)
        try:
            for batch in map(self._columns, steps):
                real, rows = self._images_of(batch)
                keys = example_keys(self.order.seed, batch.epoch[real], batch.row[real] + self.order.first_row)
                expected = np.zeros(len(rows), "S1") if digests is None else digests.of(rows)
                # The arguments `place` of the graph: (paths, offsets), or (encoded images,).
                if is_in_graph:
                    place = self.table.places(rows)
                else:
                    place = (np.array([*itertools.islice(fetched, len(rows))], object),)
                yield keys, self.verifies & ~self.table.verified.sound[rows], expected, *place
        except Exception as error:
            self.failures.append(error)

    def _consume(self, images: list[Images]) -> Generator[Batch]:
        try:
            for step in self.steps:
                batch = self._columns(step)
                while (pixels := self._next(images[0], batch)) is None:
                    images[0] = self._images(step)
                keep_freed_memory()
                yield self._with_images(step, batch, pixels)
        finally:
            self._end(images)

    def _end(self, images: list[Any]) -> None:
        images.clear()
        self.table.verified.write_cache(self.shard.index)

    def _next(self, images: Images, batch: Batch) -> np.ndarray | None:
        """Return the pixels of a batch without padding; None after unusable images were found and substituted."""
        rows = self._images_of(batch)[1]
        if not len(rows):
            side, pixels = self.pixels.image_size, self.pixels.format
            return np.zeros((0, side, side, pixels.channels), pixels.dtype)
        try:
            pixels, verdicts = next(images, _NO_IMAGES)
            if len(verdicts) < len(rows):
                failure = self.failures.pop()
            elif len(refused := rows[verdicts == REFUSED]):
                rows, failure = refused, InputError(f"{self.table.name(int(refused[0]))}: changes while it is read")
            else:
                if self.verifies:
                    self.table.verified.add(rows[verdicts == SOUND], self.shard.index)
                return pixels
        # TensorFlow raises UnicodeDecodeError if its error message contains bytes of a file or a path.
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            failure = error
        return self._refuse(rows, failure)

    def _refuse(self, rows: np.ndarray, failure: Exception) -> None:
        """Find the unusable images among some rows, and substitute them.

        Raises: InputError if images may not be substituted; `failure` if all images are usable.
        """
        if isinstance(failure, Unreachable):
            # The search would read each image again, and wait again for the store.
            raise failure
        faults = dict[int, str]()
        for row in np.unique(rows).tolist():
            with pass_faults_to(functools.partial(faults.__setitem__, row)):
                data, digests = self.table.read(row), self.table.digests
                with about(self.table.name(row)):
                    if digests is not None and (fault := digests.fault(row, data)):
                        raise InputError(fault)
                    sound_image(data)
                    check_decoding(data, self.pixels.format)
        if not faults:
            raise failure
        for row, fault in faults.items():
            self.table.verified.sound[row] = False
            if self.substitutes is None:
                raise InputError(fault) from None
            self.substitutes.refuse(row, fault)

    def _with_images(self, step: int, batch: Batch, pixels: np.ndarray) -> Batch:
        """Return the batch with its images; the images of padding are 0."""
        image = pixels
        if len(pixels) < len(batch.mask):
            image = np.zeros((len(batch.mask), *pixels.shape[1:]), pixels.dtype)
            image[batch.mask > 0] = pixels
        if self.substitutes is None:
            return batch._replace(image=image)
        changed = (self.substitutes.resolve(batch.row) != batch.row) & (batch.mask > 0)
        # In a batch that spans two epochs, only rows of the first are marked, so each row is marked once per epoch.
        changed &= self.shard.of(self.order.is_of_first_epoch(step), padding=False)
        return batch._replace(image=image, substituted=changed.astype(np.float32))

    def _images_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return (mask of the examples without padding, bool[B], the rows whose images are read for them, int32[b])."""
        real = batch.mask > 0
        rows = batch.row[real]
        return real, rows if self.substitutes is None else self.substitutes.resolve(rows)

    def _columns(self, step: int) -> Batch:
        return columns(self.table, self.order, step, self.shard)
