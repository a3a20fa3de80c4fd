"""Batches of images as a function of the step: tf.data reads, decodes and resizes, and keeps no state.

To resume is to start at a later step: what lies before it is never read.
"""

from collections.abc import Generator
from typing import Any

from jaxddp.data.batch import Batch
from jaxddp.data.images.decode import eval_image, train_image
from jaxddp.data.images.windows import Crop
from jaxddp.data.order import EvalOrder, SampleOrder, check_seed
from jaxddp.data.pipeline import Pipeline
from jaxddp.data.substitutes import Substitutes
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError


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
    substitutes: Substitutes | None = None,
) -> Generator[Batch]:
    """The training batches of steps [start, stop), shard `index` of `count`, with images of uint8[B, S, S, 3].

    An example's pixels are a function of (seed, epoch, row), whatever the shard, the first step and the threads. The
    work begins at once, in the background; closing or dropping the iterator ends it.

    Args:
        seed: 0..2**63-1, for the crops.
        image_size: S.
        threads: by default as many as the cores that this process may use.
        substitutes: what stands in for images that cannot be used; without it they end the stream.

    Raises:
        InputError: at once, where an argument is out of range or the batch does not divide by `count`; from the
            iterator, at the first batch with an image that is missing, empty, cut short, damaged, too large, or no
            image. Each file is read to its last pixel the first time that a process meets it.
        Unreachable: from the iterator, where the table's store gave no answer within its deadline.
    """
    check_seed(seed)

    def load(data: Any, key: Any) -> Any:
        return train_image(data, key, crop, image_size)

    stream = Pipeline(table, order, range(start, stop), index, count, seed, image_size, load, substitutes)
    return stream.batches(threads)


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

    Where the last batch is padded, mask and image are 0. `resize == image_size` keeps square images whole. Nothing
    stands in for a bad image: a figure over other images would be none of this set.

    Raises:
        InputError: as `image_batches`, and where `image_size` is larger than `resize`.
    """
    if image_size > resize:
        raise InputError(f"image size {image_size}: the crop exceeds the resized short side; use at most {resize}")

    def load(data: Any, _: Any) -> Any:
        return eval_image(data, image_size, resize)

    steps = range(order.num_batches)
    return Pipeline(table, order, steps, index, count, 0, image_size, load).batches(threads)


def whole_image_batches(
    table: ExampleTable,
    order: EvalOrder,
    *,
    image_size: int,
    index: int = 0,
    count: int = 1,
    threads: int | None = None,
    substitutes: Substitutes | None = None,
) -> Generator[Batch]:
    """Every example once, in the table's order, with the pixels that `image_batches` gives it where the crop is whole.

    Where the last batch is padded, mask and image are 0.

    Raises:
        InputError: as `image_batches`.
    """

    def load(data: Any, key: Any) -> Any:
        return train_image(data, key, Crop("whole"), image_size)

    steps = range(order.num_batches)
    return Pipeline(table, order, steps, index, count, 0, image_size, load, substitutes).batches(threads)
