"""Feeds the training step with batches, or with the row numbers of images that are kept on the devices."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxddp.augment.geometry import Side
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, size
from jaxddp.core.phases import doing, reached
from jaxddp.core.threads import map_in_threads, taken_ahead
from jaxddp.data.batch import Batch, Division, Growth
from jaxddp.data.order import EvalOrder, SampleOrder, Shard, UnitedOrder, columns, stacked_columns, unlabelled_seed
from jaxddp.data.source import Source, Substitutes, image_dtype
from jaxddp.engine.programs import ResidentImages, place_images
from jaxddp.measure.memory import images_text, memory_errors
from jaxddp.mesh import Topology
from jaxddp.training.epoch_sums import check_substituted
from jaxddp.training.plan import cut, full_length, max_substituted
from jaxddp.training.run import Chunk, ImageGrowth

LONGEST_CHUNK = 32
"""The most steps in a dispatch: enough to hide the cost of a dispatch, and few enough to react to SIGTERM soon."""

TRAINING, VALIDATION, UNLABELLED = "training", "validation", "unlabelled"
"""The uses of images that are kept on the devices."""

_SMALLER = ("lower ", Key("data.image_size"), " or ", Key("data.limit"), ", or set ", Key("data.cache"), " to none")
_LOAD_BATCH = 256
_PLACED_AHEAD = 2


class Resident(NamedTuple):
    """A source and its images, [N + padding, H, W, C], on every device. Row r of `images` is row r of `source`."""

    source: Source
    images: jax.Array


@dataclass(frozen=True)
class Feed:
    """A training source with its order and its config, for the devices of a run.

    If the image size grows, files are decoded at the size of each step. If the source or the devices keep all images at
    one size, the step resizes them.

    Attributes:
        substitutes: the images that replace images that cannot be used.
        growth: the growth of the image size; None if it is constant.
        whole: the division of a batch.
        unlabelled: the feed of a second source, with its own order and substitutes. A step takes a batch of each feed.
    """

    source: Source
    order: SampleOrder
    data: DataConfig = field(repr=False)
    topology: Topology
    substitutes: Substitutes | None = field(default=None, repr=False)
    growth: Growth | None = None
    resident: dict[str, Resident] = field(default_factory=dict, repr=False)
    """The images that are on the devices, by use."""
    unlabelled: "Feed | None" = None
    whole: Shard = field(default_factory=Shard, repr=False)

    @property
    def shard(self) -> Shard:
        """The part of every training batch that this process loads."""
        return self.whole._replace(index=self.topology.peers.process_index, count=self.topology.peers.process_count)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Iterate over the batches of steps `start` to `stop - 1`, on the devices. Earlier batches are not read."""
        return _placed(self.read(range(start, stop)), self.topology)

    def divided(self, sizes: tuple[int, ...], division: Division | None = None) -> "Feed":
        """Return the feed with another division of a batch. Images on the devices stay there.

        The examples of slices of different sizes, and of processes with data of their own, keep their order.
        """
        whole = Shard(sizes=sizes)
        if division is not None and not sizes and not isinstance(self.order, UnitedOrder):
            whole = Shard(shares=division.shares, microbatches=division.accumulate)
        return replace(self, whole=whole, unlabelled=self.unlabelled and self.unlabelled.divided(sizes, division))

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the batch that `batches` yields for a step, from 0, on all devices; -1 for padding."""
        return self.whole.of(self.order.rows(step))

    def with_seed(self, seed: int) -> "Feed":
        """Return the feed with another seed. Images on the devices stay there."""
        order, substitutes = replace(self.order, seed=seed), self.source.substitutes(self.data)
        unlabelled = self.unlabelled and self.unlabelled.with_seed(unlabelled_seed(seed))
        return replace(self, order=order, substitutes=substitutes, unlabelled=unlabelled)

    def abstract_batch(self, size: int | None = None) -> Batch:
        """Return the shapes and shardings of a global batch of `size` slots, by default of those of `rows`."""
        size = size or self.whole.slots(self.order.num_slots)
        batch = columns(self.source, EvalOrder(len(self.source), size), 0)
        shape = len(batch.row), *self.source.image_shape(self.data)
        image = jax.ShapeDtypeStruct(shape, image_dtype(self.source, self.data))
        weight = None if getattr(self.source, "weights", None) is None else batch.mask
        batch = batch._replace(image=image, substituted=batch.mask if self.substitutes else None, weight=weight)
        sharded = self.topology.sharded
        shapes = jax.tree.map(lambda column: jax.ShapeDtypeStruct(column.shape, column.dtype, sharding=sharded), batch)
        return shapes._replace(unlabelled=self.unlabelled and self.unlabelled.abstract_batch())

    def loading_and_resizing(self, side: int) -> tuple[DataConfig, Side | None]:
        """Return the config that loads training images of a side, and the size to which the step resizes them."""
        data = self.data if self.data.cache == "device" else replace(self.data, image_size=side)
        return data, None if self.source.image_shape(data)[0] == side else Side(side, data.interpolation)

    def growing(self, total_steps: int) -> ImageGrowth | None:
        """Return the growth of the images in a run of this length; None if their size is constant."""
        if self.growth is None:
            return None
        largest = self.growth.side(total_steps - 1)
        return ImageGrowth(self.growth.side, lambda feed: tuple(self._with_side(each, largest) for each in feed))

    def _with_side(self, argument: Any, side: int) -> Any:
        """Return an argument of a chunk for images of another side. The images of a batch become abstract shapes."""
        if not isinstance(argument, Batch):
            return argument
        (data, resizing), image = self.loading_and_resizing(side), argument.image
        if image is not None:
            shape = len(image), *self.source.image_shape(data)
            image = jax.ShapeDtypeStruct(shape, image.dtype, sharding=image.sharding)
        return argument._replace(image=image, side=resizing, unlabelled=self._with_side(argument.unlabelled, side))

    def place(self, val: Source | None = None) -> None:
        """Copy the training images, and the images of a validation set, to every device, unless they are already there.

        Each file is decoded once, by one process, which sends the image to the other processes over the devices.
        Raises: InputError if the images do not fit into a device's free memory, or too many of them cannot be used.
        """
        placed = {use: resident.source for use, resident in self.resident.items()}
        missing = {use: feed for use, feed in self._by_use(val).items() if placed.get(use) is not feed.source}
        # Free the memory of a previous validation set.
        for use in missing.keys() & self.resident.keys():
            del self.resident[use]
        needed, free = _bytes_of(missing), self.topology.free_memory()
        if free is not None and sum(needed.values()) > free:
            problem = f": each device needs memory for {images_text(needed)}, and has {size(free)} free"
            raise InputError(Key("data.cache", "device", '"device"'), problem, advice=_SMALLER)
        for use, feed in missing.items():
            when = f"while the {use} images were copied to the devices"
            out_of_memory = memory_errors(lambda when=when: when, lambda: _SMALLER)
            with doing(f"placing {use} images on the devices", len(feed.source), "image"), out_of_memory:
                self.resident[use] = Resident(feed.source, feed._decoded(use))

    def resident_bytes(self, val: Source | None) -> dict[str, int]:
        """Return the bytes of the training images and of a validation set on each device, by use."""
        return _bytes_of(self._by_use(val))

    def resident_chunks(self, chunks: Iterable[range], key: jax.Array | None = None) -> Iterator[Chunk]:
        """Iterate over what `steps_on_residents` takes beside the state: images, columns and the key, for each chunk.

        A thread computes and places a chunk's columns while the devices compute the one before. Raises: see `place`.
        """
        self.place()
        images: ResidentImages = self.resident[TRAINING].images
        if self.unlabelled is not None:
            images = images, self.resident[UNLABELLED].images

        def placed(steps: range) -> Chunk:
            return Chunk(len(steps), (images, self.topology.place(self._stacked(steps)), key))

        yield from map_in_threads(placed, chunks, ahead=1)

    def resident_eval(self, source: Source, batch_size: int, longest: int) -> Iterator[tuple[jax.Array, Batch]]:
        """Yield what `make_eval_step` takes on resident images, at most `longest` batches at once; see `place`."""
        self.place(source)
        images, order = self.resident[VALIDATION].images, EvalOrder(len(source), batch_size)
        shard = Shard.of_process(self.topology.peers)
        for numbers in cut(range(order.num_batches), full_length(order.num_batches, longest)):
            yield images, self.topology.place(stacked_columns(source, order, numbers, shard))

    def read(self, steps: range) -> Iterator[Batch]:
        """Iterate over this process's parts of the batches of some steps."""
        segments = iter([(steps, None)] if self.growth is None else self.growth.segments(steps))
        # Loading of the first segment starts at once. Each later segment starts when the segment before it is finished.
        loaded = itertools.starmap(self._read_segment, segments)
        batches = itertools.chain(next(loaded, ()), itertools.chain.from_iterable(loaded))
        if self.unlabelled is None:
            return batches
        pairs = zip(batches, self.unlabelled.read(steps), strict=True)
        return (batch._replace(unlabelled=other) for batch, other in pairs)

    def _read_segment(self, steps: range, side: int | None) -> Iterator[Batch]:
        """Iterate like `read` over steps whose images have the same side; `side` is None if the size is constant."""
        data, resizing = (self.data, None) if side is None else self.loading_and_resizing(side)
        batches = self.source.train_batches(self.order, data, steps, self.shard, self.substitutes)
        return batches if resizing is None else (batch._replace(side=resizing) for batch in batches)

    def _stacked(self, steps: range) -> Batch:
        """Return the columns of several steps, stacked and without the images; see `stacked_columns`."""
        batch = stacked_columns(self.source, self.order, steps, self.shard)
        side = None if self.growth is None else self.loading_and_resizing(self.growth.side(steps[0]))[1]
        return batch._replace(side=side, unlabelled=self.unlabelled and self.unlabelled._stacked(steps))

    def _by_use(self, val: Source | None) -> dict[str, "Feed"]:
        """Return the feeds that load the images for the devices: those of training, and that of a validation set."""
        kept = {use: feed for use, feed in ((TRAINING, self), (UNLABELLED, self.unlabelled)) if feed is not None}
        feeds = {use: replace(feed, data=replace(feed.data, crop="whole")) for use, feed in kept.items()}
        if val is not None:
            feeds[VALIDATION] = replace(self, source=val, data=self.data.of_evaluation)
        return feeds

    @property
    def _load_order(self) -> EvalOrder:
        return EvalOrder(len(self.source), -(-_LOAD_BATCH // self.topology.num_devices) * self.topology.num_devices)

    def _abstract_images(self) -> jax.ShapeDtypeStruct:
        order, shape = self._load_order, self.source.image_shape(self.data)
        return jax.ShapeDtypeStruct((order.num_batches * order.batch_size, *shape), image_dtype(self.source, self.data))

    def _decoded(self, use: str) -> jax.Array:
        """Decode the images of the source, without random crops, and copy them to the devices."""
        order, shard, substituted = self._load_order, Shard.of_process(self.topology.peers), list[int]()
        if use == VALIDATION:
            batches = self.source.eval_batches(order, self.data, shard)
        else:
            batches = self.source.train_batches(order, self.data, range(order.num_batches), shard, self.substitutes)

        def load_images() -> Iterator[np.ndarray]:
            for number, batch in enumerate(batches):
                reached(number * order.batch_size)
                substituted.append(0 if batch.substituted is None else int(batch.substituted.sum()))
                yield batch.image

        images = place_images(load_images(), self._abstract_images(), self.topology)
        total = sum(self.topology.peers.exchange(f"substituted {use} images", sum(substituted)))
        most = max_substituted(self.data.max_bad_images, len(self.source))
        check_substituted(total, most, Key.plain("data.cache", "device"))
        return images


def _bytes_of(feeds: Mapping[str, Feed]) -> dict[str, int]:
    images = {use: feed._abstract_images() for use, feed in feeds.items()}
    return {use: each.size * each.dtype.itemsize for use, each in images.items()}


def eval_batches(source: Source, data: DataConfig, order: EvalOrder, topology: Topology) -> Iterator[Batch]:
    """Iterate over a source on the devices, each example once. The last batch is padded and masked."""
    return _placed(source.eval_batches(order, data.of_evaluation, Shard.of_process(topology.peers)), topology)


def limit_batch_size(batch_size: int, source: Source, topology: Topology) -> int:
    """Limit a batch size of evaluation to the size of a source, rounded up to a multiple of the number of devices."""
    return min(batch_size, -(-len(source) // topology.num_devices) * topology.num_devices)


def _placed(batches: Iterable[Batch], topology: Topology) -> Iterator[Batch]:
    """Copy batches to the devices ahead of their use, so that copying overlaps with computation."""
    return taken_ahead(map(topology.place, batches), _PLACED_AHEAD)
