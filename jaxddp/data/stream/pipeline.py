"""A tf.data pipeline for one shard: a producer of file names, a graph that decodes images, and a consumer.

The graph takes file names and keys, and returns pixels. It is traced once for equal settings. The consumer computes
labels, masks, rows and epochs from the order, and adds them to the pixels. The pipeline has no state between batches.
After an unusable image is substituted, the pipeline starts again at the step with that image.
"""

import functools
import hashlib
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.data.batch import Batch, PixelFormat
from jaxddp.data.images.verify import sound_image
from jaxddp.data.order import Order, Shard, check_order, columns
from jaxddp.data.soundness import Omissions, Substitutes
from jaxddp.data.stream.decode import Area, Interpolation, check_decoding, eval_image, example_keys, train_image
from jaxddp.data.stream.tensorflow_cpu import keep_freed_memory, tf

MOST_GRAPHS = 16
REFUSED, SOUND, STRAY = range(3)
"""The verdicts that `verify_image` returns."""
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


@dataclass(frozen=True)
class TrainPixels:
    """A function of an encoded image, a string scalar, and a key, int64[2], to pixels [S, S, C]; see `train_image`."""

    image_size: int
    format: PixelFormat
    area: Area | None
    interpolation: Interpolation

    def __call__(self, encoded: Any, key: Any) -> Any:
        return train_image(encoded, key, self.area, self.image_size, self.format, self.interpolation)


@dataclass(frozen=True)
class EvalPixels:
    """A function of an encoded image to the pixels for evaluation; the key is ignored. See `eval_image`."""

    image_size: int
    format: PixelFormat
    resize: int
    interpolation: Interpolation
    squash: bool

    def __call__(self, encoded: Any, key: Any) -> Any:
        size = self.image_size, self.resize
        return eval_image(encoded, *size, self.format, self.interpolation, squash=self.squash)


Pixels = TrainPixels | EvalPixels


@functools.lru_cache(maxsize=MOST_GRAPHS)
def pixel_graph(read: Callable[[Any, Any], Any] | None, pixels: Pixels) -> Any:
    """Return a graph function (key, verifies, digest, *place) -> (pixels, verdict); see `verify_image`.

    Args:
        read: the result of `Store.in_graph`: a function of `place`, which is (path, offset). If `read` is None, `place`
            is the encoded image.
    """
    places = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)][: 2 if read else 1]

    arguments = tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.string)

    @tf.function(input_signature=(*arguments, *places), autograph=False)
    def load(key: Any, verifies: Any, digest: Any, *place: Any) -> Any:
        image, verdict = verify_image(read(*place) if read else place[0], verifies, digest)
        shape = pixels.image_size, pixels.image_size, pixels.format.channels
        black = functools.partial(tf.zeros, shape, pixels.format.dtype)
        return tf.cond(verdict == REFUSED, black, lambda: pixels(image, key)), verdict

    return load


def verify_image(data: Any, verifies: Any, digest: Any) -> tuple[Any, Any]:
    """Verify an encoded image; return the image and an int32 verdict.

    The verdict is `REFUSED`, `SOUND`, or `STRAY`. `STRAY` means that the image is sound after removal of bytes that do
    not belong to it, and the image is returned without these bytes.

    Args:
        verifies: bool scalar, whether to verify the image; if False, only the digest is compared.
        digest: string scalar, the expected SHA-256; empty to accept any digest.
    """
    digest_verdict = tf.cond(
        tf.strings.length(digest) > 0,
        lambda: tf.ensure_shape(tf.numpy_function(_compare_digest, [data, digest], tf.int32), []),
        lambda: tf.constant(SOUND),
    )
    image, verdict = tf.cond(
        verifies & (digest_verdict == SOUND),
        lambda: tuple(tf.numpy_function(_verify_bytes, [data], (tf.string, tf.int32))),
        lambda: (data, digest_verdict),
    )
    return tf.ensure_shape(image, []), tf.ensure_shape(verdict, [])


def _compare_digest(data: bytes, digest: bytes) -> np.int32:
    return np.int32(SOUND if hashlib.sha256(data).digest() == digest else REFUSED)


def _verify_bytes(data: bytes) -> tuple[bytes, np.int32]:
    try:
        _, image = sound_image(data)
    except InputError:
        return data, np.int32(REFUSED)
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
    substitutes: Substitutes | Omissions | None = None
    verifies: bool = True
    """Whether images are verified to the last pixel, except for images that `table.verified` marks as sound."""
    failures: list[Exception] = field(default_factory=list)
    """The exception that ended the producer. It is not passed to TensorFlow, which would print its traceback."""

    def batches(self) -> Generator[Batch]:
        """Return an iterator over the batches of the shard. Threads start to prepare batches immediately."""
        check_order(self.table, self.order, self.shard)
        load = pixel_graph(self.table.store.in_graph(), self.pixels)

        def start(step: int) -> Images:
            return self._images(load, self.steps[self.steps.index(step) :])

        images = [start(self.steps[0])] if self.steps else []
        batches = self._consume(images, start)
        # Deletion of TensorFlow's iterator waits for its threads, one of which runs Python code in `_produce`. During
        # the shutdown of the interpreter, that thread never returns, so the iterator must be deleted before.
        weakref.finalize(batches, self._end, images)
        return batches

    def _images(self, load: Any, steps: range) -> Images:
        """Yield (pixels, [b, S, S, C], verdicts, int32[b]) of the b examples of each batch, without padding."""
        # A scheduler or `taskset` may give this process fewer cores than the machine has.
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options = tf.data.Options()
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
        images: Any = dataset.as_numpy_iterator()
        return images

    def _produce(self, steps: range) -> Iterator[tuple[np.ndarray, ...]]:
        batches = ((batch, *self._images_of(batch)) for batch in map(self._columns, steps))
        # `fetched` is ahead of `decoded` by some batches, because images of a remote store are fetched in advance.
        fetched, decoded = itertools.tee(batches)
        try:
            for (batch, real, rows), places in zip(decoded, self._places(rows for _, _, rows in fetched), strict=True):
                keys = example_keys(self.order.seed, batch.epoch[real], batch.row[real] + self.order.first_row)
                yield keys, self.verifies & ~self.table.verified.sound[rows], self._digests(rows), *places
        except Exception as error:
            self.failures.append(error)

    def _places(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the arguments `place` of the graph for each batch of rows: (paths, offsets), or (encoded images,)."""
        if self.table.store.in_graph() is None:
            return _fetched(self.table, batches)
        return map(self.table.places, batches)

    def _digests(self, rows: np.ndarray) -> np.ndarray:
        """Return the expected digests of int64[b] rows, bytes[b]; empty strings if the table has no digests."""
        digests = self.table.digests
        return np.zeros(len(rows), "S1") if digests is None else digests.of(rows)

    def _consume(self, images: list[Images], start: Callable[[int], Images]) -> Generator[Batch]:
        try:
            for step in self.steps:
                batch = self._columns(step)
                while (pixels := self._next(images[0], batch)) is None:
                    images[0] = start(step)
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
        # TensorFlow raises UnicodeDecodeError if its error message contains bytes of a file or a path.
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            self._refuse(rows, error)
            return None
        if len(verdicts) < len(rows):
            self._refuse(rows, self.failures.pop())
            return None
        if len(refused := rows[verdicts == REFUSED]):
            self._refuse(refused, InputError(f"{self.table.name(int(refused[0]))}: changes while it is read"))
            return None
        if self.verifies:
            self.table.verified.add(rows[verdicts == SOUND], self.shard.index)
        return pixels

    def _refuse(self, rows: np.ndarray, failure: Exception) -> None:
        """Find the unusable images among some rows, and substitute them.

        Raises: InputError if images may not be substituted; `failure` if all images are usable.
        """
        if isinstance(failure, Unreachable):
            # The search would read each image again, and wait again for the store.
            raise failure
        has_bad_image = False
        for row, fault in self._faults(rows):
            has_bad_image, self.table.verified.sound[row] = True, False
            if self.substitutes is None:
                raise InputError(fault) from None
            self.substitutes.refuse(row, fault)
        if not has_bad_image:
            raise failure

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
        changed &= self.shard.of(self.order.epoch_indices(step)) == self.order.first_epoch(step)
        return batch._replace(image=image, substituted=changed.astype(np.float32))

    def _faults(self, rows: np.ndarray) -> Iterator[tuple[int, str]]:
        """Yield (row, fault) for each unusable image."""
        for row in np.unique(rows).tolist():
            try:
                data = self.table.read(row)
            except InputError as error:
                yield row, str(error)
                continue
            if self.table.digests is not None and (fault := self.table.digests.fault(row, data)):
                yield row, f"{self.table.name(row)}: {fault}"
                continue
            try:
                sound_image(data)
                check_decoding(data, self.pixels.format)
            except InputError as error:
                yield row, f"{self.table.name(row)}: {error}"

    def _images_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return (mask of the examples without padding, bool[B], the rows whose images are read for them, int32[b])."""
        real = batch.mask > 0
        rows = batch.row[real]
        return real, rows if self.substitutes is None else self.substitutes.resolve(rows)

    def _columns(self, step: int) -> Batch:
        return columns(self.table.labels, self.order, step, self.shard)


def _fetched(table: Any, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray]]:
    """Yield the encoded images of each batch, fetched in advance by threads. The threads end with the iterator."""
    pending: deque[list[Future[bytes]]] = deque()

    def oldest() -> tuple[np.ndarray]:
        return (np.array([image.result() for image in pending.popleft()], object),)

    pool = ThreadPoolExecutor(FETCH_THREADS)
    try:
        for rows in batches:
            pending.append([pool.submit(table.read, row) for row in rows.tolist()])
            if len(pending) > BATCHES_AHEAD:
                yield oldest()
        while pending:
            yield oldest()
    finally:
        # Closing the stream must not wait for a store that does not answer.
        pool.shutdown(wait=False, cancel_futures=True)
