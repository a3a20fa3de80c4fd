"""A table becomes placed batches, whatever it is: files through tf.data, or arrays in memory."""

import itertools
from collections.abc import Iterator
from typing import Any

from jaxddp.augment.bounds import check_augment, check_pairs
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import DataConfig
from jaxddp.data.arrays import ArrayTable, array_batches, array_eval_batches
from jaxddp.data.batch import Batch
from jaxddp.data.opening import Table
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.substitutes import Substitutes
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError
from jaxddp.mesh import Topology
from jaxddp.training.evaluation import prefetch


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
    shape = image_shape(table, data)
    if not len(data.mean) == len(data.std) >= shape[-1]:
        raise InputError(
            f"data.mean has {len(data.mean)} values, data.std {len(data.std)}, and images of {shape} have {shape[-1]} "
            "channels; give a value for each channel"
        )
    check_augment(data.augment, shape)
    check_pairs(data.augment, order.batch_size, topology.num_devices)
    return Preprocess(data.mean, data.std, data.augment, order.seed, dtype)


def make_substitutes(table: Table, data: DataConfig) -> Substitutes | None:
    """What stands in for images that cannot be used, where the config lets it."""
    if data.bad_images == "fail" or isinstance(table, ArrayTable):
        return None
    return Substitutes(table)


def check_comparable(table: Table, trained: Table, data: DataConfig) -> None:
    """What a model that is trained on one table is measured over must be made of images and classes like its own.

    Raises:
        InputError: other classes, another size of images in memory, or a crop that is larger than the resized image.
    """
    theirs, ours = table.class_names, trained.class_names
    if isinstance(table, ExampleTable) and isinstance(trained, ExampleTable):
        theirs, ours = table.class_ids, trained.class_ids
    for label, (there, here) in enumerate(itertools.zip_longest(theirs, ours)):
        if there != here:
            raise InputError(
                f"validation data: class {label} is {there!r}, and {here!r} in the training data; "
                "select the same classes in both"
            )
    if image_shape(table, data) != image_shape(trained, data):
        shapes = f"{image_shape(table, data)}, and {image_shape(trained, data)} in the training data"
        raise InputError(f"validation data: images of {shapes}; give both the same shape")
    if not isinstance(table, ArrayTable) and data.image_size > data.resize:
        raise InputError(
            f"data.resize={data.resize}: validation crops data.image_size={data.image_size} pixels from images of this "
            f"short side; set data.resize to {data.image_size} or more (8/7 of it is usual)"
        )


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
