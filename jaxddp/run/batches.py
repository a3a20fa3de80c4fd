"""A table becomes placed batches, whatever it is: files through tf.data, or arrays in memory."""

from collections.abc import Iterator
from typing import Any

from jaxddp.config import DataConfig
from jaxddp.data.arrays import ArrayTable, array_batches, array_eval_batches
from jaxddp.data.batch import Batch
from jaxddp.data.opening import Table
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.substitutes import Substitutes
from jaxddp.engine.augment.check import check_augment, check_pairs
from jaxddp.engine.images import Preprocess
from jaxddp.parallel.topology import Topology
from jaxddp.runtime.evaluate import prefetch


def image_shape(table: Table, data: DataConfig) -> tuple[int, int, int]:
    """(H, W, C) of the images that the network will see."""
    return table.image_shape if isinstance(table, ArrayTable) else (data.image_size, data.image_size, 3)


def make_preprocess(
    table: Table, order: SampleOrder, data: DataConfig, topology: Topology, dtype: Any = "float32"
) -> Preprocess:
    """What is done to the images on the device.

    Raises:
        InputError: a batch that the devices cannot share, or augmentation that is out of bounds.
    """
    topology.check_batch_size(order.batch_size)
    check_augment(data.augment, image_shape(table, data))
    check_pairs(data.augment, order.batch_size, topology.num_devices)
    return Preprocess(data.mean, data.std, data.augment, order.seed, dtype)


def make_substitutes(table: Table, data: DataConfig) -> Substitutes | None:
    """What stands in for images that cannot be used, where the config lets it."""
    if data.bad_images == "fail" or isinstance(table, ArrayTable):
        return None
    return Substitutes(table)


def train_batches(
    table: Table,
    order: SampleOrder,
    data: DataConfig,
    topology: Topology,
    start: int,
    stop: int,
    substitutes: Substitutes | None = None,
) -> Iterator[Batch]:
    """The placed training batches of steps `start` to `stop - 1`; nothing before `start` is read."""
    if isinstance(table, ArrayTable):
        local = array_batches(table, order, start=start, stop=stop, **share(topology))
    else:
        # TensorFlow takes seconds to import, and arrays need none of it.
        from jaxddp.data.images.windows import Crop
        from jaxddp.data.stream import image_batches

        sizes = {"image_size": data.image_size, "seed": order.seed, **share(topology)}
        crop = Crop(data.crop, data.crop_area)
        local = image_batches(table, order, crop, start=start, stop=stop, substitutes=substitutes, **sizes)
    return prefetch(local, topology.place)


def eval_batches(table: Table, batch_size: int, data: DataConfig, topology: Topology) -> Iterator[Batch]:
    """Placed batches that hold each example of a table once; the last is padded and masked."""
    order = EvalOrder(len(table), batch_size)
    if isinstance(table, ArrayTable):
        local = array_eval_batches(table, order, **share(topology))
    else:
        from jaxddp.data.stream import image_eval_batches

        sizes = {"image_size": data.image_size, "resize": data.resize, **share(topology)}
        local = image_eval_batches(table, order, **sizes)
    return prefetch(local, topology.place)


def share(topology: Topology) -> dict[str, Any]:
    """This process's part of every batch."""
    return {"index": topology.process_index, "count": topology.process_count}
