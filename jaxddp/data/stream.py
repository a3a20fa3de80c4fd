"""Batches of images as a function of the step: tf.data reads, decodes and resizes, and keeps no state.

To resume is to start at a later step: what lies before it is never read.
"""

from collections.abc import Generator
from typing import Any

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.images.decode import eval_image, train_image
from jaxddp.data.images.windows import Crop
from jaxddp.data.order import WHOLE, EvalOrder, SampleOrder, Shard
from jaxddp.data.pipeline import Loading, Pipeline
from jaxddp.data.substitutes import Substitutes
from jaxddp.data.table import ExampleTable


def train_batches(
    table: ExampleTable,
    order: SampleOrder,
    data: DataConfig,
    steps: range,
    shard: Shard = WHOLE,
    substitutes: Substitutes | None = None,
    threads: int | None = None,
) -> Generator[Batch]:
    """The training batches of some steps, with images of uint8[B, S, S, 3], S being `data.image_size`; see `Source`.

    The work begins at once, in the background. Each file is read to its last pixel the first time that a process meets
    it.

    Args:
        order: its seed is also that of the crops.
        threads: by default as many as the cores that this process may use.

    Raises:
        InputError: as `Source.train_batches`.
        Unreachable: from the iterator, where the table's store gave no answer within its deadline.
    """
    loading = _cropped(Crop(data.crop, data.crop_area), data.image_size, order.seed)
    return Pipeline(table, order, steps, shard, loading, substitutes).batches(threads)


def eval_batches(
    table: ExampleTable, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE, threads: int | None = None
) -> Generator[Batch]:
    """Every example once, its short side resized to `data.resize` and its center cropped; see `eval_image`.

    With `data.resize == data.image_size`, square images stay whole. Bad images are never replaced: the metrics would be
    those of another data set. Raises: as `train_batches` and `ExampleTable.check_evaluation`.
    """
    table.check_evaluation(data)

    def load(encoded: Any, _: Any) -> Any:
        return eval_image(encoded, data.image_size, data.resize)

    steps = range(order.num_batches)
    return Pipeline(table, order, steps, shard, Loading(data.image_size, load)).batches(threads)


def whole_batches(
    table: ExampleTable,
    order: EvalOrder,
    data: DataConfig,
    shard: Shard = WHOLE,
    substitutes: Substitutes | None = None,
    threads: int | None = None,
) -> Generator[Batch]:
    """Every example once, with the pixels of `train_batches` where the crop is whole. Raises: as `train_batches`."""
    loading = _cropped(Crop("whole"), data.image_size, seed=0)
    return Pipeline(table, order, range(order.num_batches), shard, loading, substitutes).batches(threads)


def _cropped(crop: Crop, image_size: int, seed: int) -> Loading:
    return Loading(image_size, lambda encoded, key: train_image(encoded, key, crop, image_size), seed)
