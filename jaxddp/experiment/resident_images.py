"""`data.cache="device"`: the training images are put on every device, and steps are fed with rows of them."""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.arrays import ArrayTable, array_eval_batches
from jaxddp.data.opening import Table
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.source import stacked_columns
from jaxddp.data.substitutes import Substitutes
from jaxddp.engine.resident_steps import place_images
from jaxddp.errors import InputError
from jaxddp.experiment.batches import image_shape, share
from jaxddp.job.membership import exchange
from jaxddp.mesh import Topology
from jaxddp.training.loop import Chunk
from jaxddp.training.meter import check_substituted
from jaxddp.training.plan import max_substituted
from jaxddp.wording import size

LONGEST_CHUNK = 32
"""Steps in one dispatch, at most: enough for its cost to vanish, and few enough for SIGTERM to be answered soon."""

_LOAD_BATCH = 256


def check_cacheable(table: Table, data: DataConfig) -> None:
    """Raises:
    InputError: the images of a table are not the same in every epoch.
    """
    if not isinstance(table, ArrayTable) and data.crop == "random_area":
        raise InputError(
            'data.cache="device" with data.crop="random_area": crops of random area are drawn while decoding, anew in '
            'every epoch; set data.crop to "whole" (data.augment.pad crops on the device), or data.cache to "none"'
        )


def load_images(
    table: Table, data: DataConfig, topology: Topology, substitutes: Substitutes | None = None
) -> jax.Array:
    """The table's images on every device, uint8[N + padding, H, W, C], replicated; row r is the table's.

    Files are decoded once, each by one process, which sends it to the others through the devices.

    Raises:
        InputError: they do not fit into a device's free memory, or there are images that cannot be used: any, or with
            substitutes more than `data.max_bad_images` allows.
    """
    batch_size = -(-_LOAD_BATCH // topology.num_devices) * topology.num_devices
    order = EvalOrder(len(table), batch_size)
    shape = image_shape(table, data)
    num_rows = order.num_batches * batch_size
    needed, free = num_rows * int(np.prod(shape)), topology.free_memory()
    if free is not None and needed > free:
        raise InputError(
            f'data.cache="device": {size(needed)} of images on each device needed, {size(free)} free there; lower '
            "data.image_size or data.limit, or set data.cache to none"
        )
    if isinstance(table, ArrayTable):
        batches = array_eval_batches(table, order, **share(topology))
    else:
        from jaxddp.data.stream import whole_image_batches

        batches = whole_image_batches(
            table, order, image_size=data.image_size, substitutes=substitutes, **share(topology)
        )
    replaced = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal replaced
        for batch in batches:
            replaced += 0 if batch.substituted is None else int(batch.substituted.sum())
            yield batch.image

    images = place_images(counted(), num_rows, shape, topology)
    everywhere = sum(map(int, exchange("images that others stand in for", str(replaced))))
    check_substituted(everywhere, max_substituted(data.max_bad_images, len(table)), "data.cache=device")
    return images


def resident_chunks(
    table: Table, order: SampleOrder, topology: Topology, chunks: Iterable[range], length: int
) -> Iterator[Chunk]:
    """What `make_resident_steps` takes for each chunk: columns for `length` steps, and a number.

    Args:
        chunks: of at most `length` steps each; see `jaxddp.training.plan.Plan.chunks`.
    """
    label = table.labels if isinstance(table, ArrayTable) else table.label
    for steps in chunks:
        columns = stacked_columns(label, order, steps, length, **share(topology))
        yield Chunk(len(steps), (topology.place(columns), topology.replicate(np.int32(len(steps)))))
