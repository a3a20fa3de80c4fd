"""A source becomes what the step is fed with: placed batches, or rows of images that lie on the devices."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.order import EvalOrder, SampleOrder, Shard
from jaxddp.data.source import Source, stacked_columns
from jaxddp.data.substitutes import Substitutes
from jaxddp.engine.resident_steps import place_images
from jaxddp.errors import InputError
from jaxddp.job.membership import exchange
from jaxddp.mesh import Topology
from jaxddp.training.epoch_sums import check_substituted
from jaxddp.training.plan import max_substituted
from jaxddp.training.run import Chunk
from jaxddp.wording import size

LONGEST_CHUNK = 32
"""Steps in one dispatch, at most: enough for its cost to vanish, and few enough for SIGTERM to be answered soon."""

_LOAD_BATCH = 256
_PLACED_AHEAD = 2


@dataclass(frozen=True)
class Feed:
    """A training source, its order and its config, over the devices; `substitutes` replace unusable images."""

    source: Source
    order: SampleOrder
    data: DataConfig
    topology: Topology
    substitutes: Substitutes | None = None

    @property
    def shard(self) -> Shard:
        """This process's part of every batch."""
        return Shard(self.topology.process_index, self.topology.process_count)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The placed training batches of steps `start` to `stop - 1`; nothing before `start` is read."""
        steps = range(start, stop)
        return self._placed(self.source.train_batches(self.order, self.data, steps, self.shard, self.substitutes))

    def eval_batches(self, source: Source, batch_size: int) -> Iterator[Batch]:
        """Placed batches that hold each example of another source once; the last is padded and masked."""
        return self._placed(source.eval_batches(EvalOrder(len(source), batch_size), self.data, self.shard))

    @cached_property
    def images(self) -> jax.Array:
        """The source's images on every device, uint8[N + padding, H, W, C], replicated; row r is the source's.

        Files are decoded once, each by one process, which sends it to the others by the devices. Raises: InputError;
        they do not fit into a device's free memory, or more images than may be cannot be used.
        """
        batch_size = -(-_LOAD_BATCH // self.topology.num_devices) * self.topology.num_devices
        order = EvalOrder(len(self.source), batch_size)
        shape = self.source.image_shape(self.data)
        num_rows = order.num_batches * batch_size
        needed, free = num_rows * int(np.prod(shape)), self.topology.free_memory()
        if free is not None and needed > free:
            raise InputError(
                f'data.cache="device": {size(needed)} of images on each device needed, {size(free)} free there; lower '
                "data.image_size or data.limit, or set data.cache to none"
            )
        substituted = 0

        def counted() -> Iterator[np.ndarray]:
            nonlocal substituted
            for batch in self.source.whole_batches(order, self.data, self.shard, self.substitutes):
                substituted += 0 if batch.substituted is None else int(batch.substituted.sum())
                yield batch.image

        images = place_images(counted(), num_rows, shape, self.topology)
        everywhere = sum(map(int, exchange("substituted images", str(substituted))))
        check_substituted(everywhere, max_substituted(self.data.max_bad_images, len(self.source)), "data.cache=device")
        return images

    def resident_chunks(self, chunks: Iterable[range]) -> Iterator[Chunk]:
        """What `make_resident_steps` takes for chunks of steps: images and columns."""
        for steps in chunks:
            columns = stacked_columns(self.source.labels, self.order, steps, self.shard)
            yield Chunk(len(steps), (self.images, self.topology.place(columns)))

    def _placed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches on the devices ahead of their use, so that copying overlaps with computing."""
        placed: deque[Batch] = deque()
        for batch in batches:
            placed.append(self.topology.place(batch))
            if len(placed) > _PLACED_AHEAD:
                yield placed.popleft()
        yield from placed
