"""Batches of images from files, as a function of the step: tf.data opens, decodes and resizes, and keeps no state.

TensorFlow sees paths and keys, and gives back pixels. Labels, masks, rows and epochs never enter its graph: the
consumer computes them from the order and puts them beside the images. To resume is to start at a later step: what lies
before it is never read.
"""

import os
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.data.augment import Crop, eval_image, example_keys, train_image
from jaxddp.data.batch import Batch
from jaxddp.data.imagefile import AGAIN, read_header
from jaxddp.data.order import EvalOrder, Order, SampleOrder, check_seed
from jaxddp.data.source import check_order, columns
from jaxddp.data.table import ExampleTable
from jaxddp.data.tensorflow_cpu import tf
from jaxddp.errors import InputError

PREFETCH_BATCHES = 2
"""How many finished batches wait for the consumer, beyond the one in the making: the bound of the stream's memory."""

Load = Callable[[Any, Any], Any]
"""From a path, a string scalar, and a key, int64[2], to an image, uint8[S, S, 3], in TensorFlow ops."""


def image_batches(
    table: ExampleTable,
    order: SampleOrder,
    crop: Crop,
    *,
    start: int,
    stop: int,
    index: int = 0,
    count: int = 1,
    seed: int,
    image_size: int,
    threads: int | None = None,
) -> Generator[Batch]:
    """The training batches of steps [start, stop), shard `index` of `count`, with images of uint8[B, S, S, 3].

    An example's pixels are a function of (seed, epoch, row), whatever the shard, the first step and the threads. The
    work begins at once, in the background; closing or dropping the iterator ends it.

    Args:
        seed: 0..2**63-1, for the crops.
        image_size: S.
        threads: by default as many as the cores that this process may use.

    Raises:
        InputError: at once, where an argument is out of range or the batch does not divide by `count`; from the
            iterator, at the first batch with an image that is missing, empty, cut short, too large, or no image.
    """
    check_seed(seed)

    def load(path: Any, key: Any) -> Any:
        return train_image(path, key, crop, image_size)

    return _Stream(table, order, range(start, stop), index, count, seed, image_size, load).batches(threads)


def image_eval_batches(
    table: ExampleTable,
    order: EvalOrder,
    *,
    image_size: int,
    resize: int,
    index: int = 0,
    count: int = 1,
    threads: int | None = None,
) -> Generator[Batch]:
    """Every example once, its short side resized to `resize` and its center cropped to `image_size`; see `eval_image`.

    Where the last batch is padded, mask and image are 0. `resize == image_size` keeps square images whole.

    Raises:
        InputError: as `image_batches`, and where `image_size` is larger than `resize`.
    """
    if image_size > resize:
        raise InputError(f"image size {image_size}: the crop exceeds the resized short side; use at most {resize}")

    def load(path: Any, _: Any) -> Any:
        return eval_image(path, image_size, resize)

    steps = range(order.num_batches)
    return _Stream(table, order, steps, index, count, 0, image_size, load).batches(threads)


def whole_image_batches(
    table: ExampleTable,
    order: EvalOrder,
    *,
    image_size: int,
    index: int = 0,
    count: int = 1,
    threads: int | None = None,
) -> Generator[Batch]:
    """Every example once, in the table's order, with the pixels that `image_batches` gives it where the crop is whole.

    Where the last batch is padded, mask and image are 0.

    Raises:
        InputError: as `image_batches`.
    """

    def load(path: Any, key: Any) -> Any:
        return train_image(path, key, Crop("whole"), image_size)

    return _Stream(table, order, range(order.num_batches), index, count, 0, image_size, load).batches(threads)


@dataclass(frozen=True)
class _Stream:
    """One shard of some steps: what its producer, its consumer and its diagnosis need to agree on."""

    table: ExampleTable
    order: Order
    steps: range
    index: int
    count: int
    seed: int
    image_size: int
    load: Load

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise InputError(f"image size {self.image_size}: use at least 1 pixel")
        check_order(self.table, self.order, self.index, self.count)

    def batches(self, threads: int | None) -> Generator[Batch]:
        images: list[Iterator[np.ndarray]] = [self._images(threads or _usable_cores()).as_numpy_iterator()]
        batches = self._consume(images)
        # To drop TensorFlow's iterator is to wait for its threads, one of which may be in Python, in `_produce`. Once
        # the interpreter has begun to end, that one never comes back: so the iterator is dropped just before, at last.
        weakref.finalize(batches, images.clear)
        return batches

    def _images(self, threads: int) -> tf.data.Dataset:
        """The pixels of one shard's batches, uint8[b, S, S, 3], b being the number of its real examples."""
        signature = (tf.TensorSpec([None], tf.string), tf.TensorSpec([None, 2], tf.int64))
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        # Parallel over images, and not within one as well.
        options.threading.max_intra_op_parallelism = 1
        # Every degree of parallelism is stated here, so there is nothing to tune and no memory that grows by tuning.
        options.autotune.enabled = False
        return (
            tf.data.Dataset.from_generator(self._produce, output_signature=signature)
            .unbatch()
            # More in the making than threads, because finished images wait in order behind a slow one.
            .map(self.load, num_parallel_calls=2 * threads, deterministic=True)
            .batch(self.order.batch_size // self.count)
            .prefetch(PREFETCH_BATCHES)
            .with_options(options)
        )

    def _produce(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in self.steps:
            batch = self._columns(step)
            real = batch.mask > 0
            yield self.table.file_paths(batch.row[real]), example_keys(self.seed, batch.epoch[real], batch.row[real])

    def _consume(self, images: list[Iterator[np.ndarray]]) -> Generator[Batch]:
        try:
            for step in self.steps:
                batch = self._columns(step)
                yield batch._replace(image=self._padded(images[0], batch))
        finally:
            images.clear()

    def _padded(self, images: Iterator[np.ndarray], batch: Batch) -> np.ndarray:
        """The next images, with zeros where the batch is padded, uint8[B, S, S, 3]."""
        num_real = np.count_nonzero(batch.mask)
        padding = np.zeros((len(batch.mask) - num_real, self.image_size, self.image_size, 3), np.uint8)
        if not num_real:
            return padding
        try:
            real = next(images)
        except (tf.errors.OpError, UnicodeDecodeError):
            # The second is TensorFlow failing to put the bytes of a file or of its path into its own message.
            self._diagnose(batch)
            raise
        return np.concatenate([real, padding]) if len(padding) else real

    def _columns(self, step: int) -> Batch:
        return columns(self.table.label, self.order, step, self.index, self.count)

    def _diagnose(self, batch: Batch) -> None:
        """Raises the `InputError` of the batch's first bad image; returns where every image is good."""
        for path in self.table.file_paths(batch.row[batch.mask > 0]).tolist():
            name = os.fsdecode(path)
            read_header(name)
            try:
                tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
            except tf.errors.OpError as error:
                raise InputError(f"{name}: does not decode ({error.message}); {AGAIN}") from None


def _usable_cores() -> int:
    """The cores that this process may run on, which a scheduler or `taskset` may have made fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
