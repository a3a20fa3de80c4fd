"""`ExampleTable`: the ids, files and labels of images in a store, which also yields batches."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.data.batch import Batch, PixelFormat
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard
from jaxddp.data.soundness import Digests, Verified
from jaxddp.data.source import ClassSelection, LabelForm, Labels, Record, Substitutes, labels_of, one_line_repr
from jaxddp.data.storage.store import Store, pickled


@dataclass(frozen=True, eq=False)
class ExampleTable:
    """N examples of K classes. The fields are columns; see `Source` for those without a docstring here."""

    store: Store
    """The store of the images: a directory, record files, or an object store."""
    id: np.ndarray
    """bytes 'S'[N], the id of each example in UTF-8."""
    path: np.ndarray
    """bytes 'S'[N], the path in the store of the file with the image, with forward slashes, in UTF-8."""
    labels: np.ndarray
    class_ids: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    """The names of the classes; by default the ids."""
    offset: np.ndarray | None = None
    """int64[N], the position of the image's record in its file; None if each file has one image."""
    digests: Digests | None = None
    """The checksums with which files are compared when they are read; None if there are no checksums."""
    group: np.ndarray | None = None
    """bytes 'S'[N], the group of each example, such as a patient; None if there are none."""
    weights: np.ndarray | None = None
    """float32[N], the weight of each example in the loss of training; None if all are equal."""
    label_form: LabelForm | None = None
    reading: str = ""
    """How the images and labels were found, for the start of a run: "class folders in seg_train/"."""

    pixel_shape = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_names", self.class_names or self.class_ids)

    def __len__(self) -> int:
        return len(self.id)

    def __repr__(self) -> str:
        return one_line_repr(self, f"the first is {self.name(0)}" if len(self) else "none")

    @property
    def num_classes(self) -> int:
        return len(self.class_ids)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256, in hex, of ids, paths, labels, classes and offsets, without the location of the store."""
        digest = hashlib.sha256(b"jaxddp example table 1\n")
        for column in (self.id, self.path, np.array([class_id.encode() for class_id in self.class_ids], "S")):
            # After a selection, the dtype may be wider than needed. The hash uses the length of the longest value.
            width = int(np.strings.str_len(column).max(initial=1))
            digest.update(b"%d %d\n" % (len(column), width))
            digest.update(column.astype(f"S{width}").tobytes())
        single = labels_of(self).single
        digest.update(single.astype("<i4").tobytes())
        if self.offset is not None:
            digest.update(self.offset.astype("<i8").tobytes())
        if single is not self.labels and (single < 0).any():
            digest.update(self.labels.tobytes())
        if self.weights is not None:
            digest.update(self.weights.tobytes())
        return digest.hexdigest()

    @cached_property
    def verified(self) -> Verified:
        """The images that were verified and are sound."""
        return Verified(self.store, self.path, self.offset)

    @cached_property
    def pickled_store(self) -> Callable[[int], bytes]:
        """The function `pickled` of the store. It returns the same object each time, so workers get it once."""
        return cache(partial(pickled, self.store))

    def check(self, data: DataConfig) -> None:
        if data.workers:
            self.pickled_store(data.workers)
        if faults := self.verified.check_files():
            row, fault = faults[0]
            count = f"{len(faults)} of {counted(len(self), 'image')} cannot be used"
            fault += files.nearest_beside(Path(self.name(row)), alike=True)
            raise InputError(f"{self.name(row)}: {fault} ({count}); put these images back, or take them out")

    # --- Single images ---

    def name(self, row: int) -> str:
        return self.store.name(*self._place(row))

    def read(self, row: int) -> bytes:
        return self.store.read(*self._place(row))

    def record(self, row: int) -> Record:
        path, offset = self._place(row)
        return Record(os.fsdecode(self.id[row]), os.fsdecode(path), None if self.offset is None else offset)

    def _place(self, row: int) -> tuple[bytes, int]:
        return bytes(self.path[row]), 0 if self.offset is None else int(self.offset[row])

    # --- Other tables ---

    def select(self, classes: ClassSelection) -> Self:
        if classes is None:
            return self
        rows, labels = labels_of(self).select(classes, os.fsdecode(self.path[0]))
        return self.rows(rows)._labelled(labels)

    def take(self, limit: int) -> Self:
        return self.rows(labels_of(self).share(limit))

    def rows(self, rows: np.ndarray) -> Self:
        columns = "id", "path", "labels", "offset", "digests", "group", "weights"
        names = [name for name in columns if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def without(self, rows: Sequence[int] | np.ndarray) -> Self:
        """Return all examples except the given rows. Raises: InputError if no example is left."""
        if not len(rows):
            return self
        left = np.delete(np.arange(len(self)), rows)
        if not len(left):
            raise InputError(f"{self.name(0)}: cannot be used, and no other example can; repair one")
        return self.rows(left)

    def without_labels(self) -> Self:
        return self._labelled(Labels(np.full(len(self), -1, np.int32), (), ()))

    def with_several_labels(self) -> Self:
        """Return the examples with multi-hot labels, uint8[N, K]."""
        if self.labels.ndim == 2:
            return self
        return replace(self, labels=(self.labels[:, None] == np.arange(self.num_classes)).astype(np.uint8))

    def with_single_labels(self) -> Self:
        """Return the examples with labels int32[N]; -1 where an example has not exactly one class."""
        return replace(self, labels=labels_of(self).single)

    def _labelled(self, labels: Labels) -> Self:
        return replace(self, labels=labels.values, class_ids=labels.ids, class_names=labels.names)

    # --- Batches ---

    def default_data(self) -> DataConfig:
        return DataConfig()

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        return data.image_size, data.image_size, data.channels

    def image_dtype(self, data: DataConfig) -> np.dtype:
        """The dtype of the pixels: uint8 or uint16."""
        return PixelFormat(data.channels, data.bits).dtype

    def check_evaluation(self, data: DataConfig) -> None:
        if data.image_size > data.resize:
            crop = Key("data.image_size" if data.eval_size is None else "data.eval_size", data.image_size)
            fault = ": validation crops ", crop, " pixels from images of this short side"
            advice = "set ", Key("data.resize"), f" to {data.image_size} or more (8/7 of it is usual)"
            raise InputError(Key("data.resize", data.resize), fault, advice=advice)

    def check_resident(self, data: DataConfig) -> None:
        if data.crop == "random_area":
            both = Key("data.cache", "device", '"device"'), " with ", Key("data.crop", "random_area", '"random_area"')
            pad = Key("data.augment.pad"), " crops on the device"
            advice = "set ", Key("data.crop"), ' to "whole" (', pad, "), or ", Key("data.cache"), ' to "none"'
            raise InputError(both, ": random-area crops differ in every epoch", advice=advice)

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        return None if data.bad_images == "fail" else Substitutes(labels_of(self), self.name)

    def train_batches(
        self, order: Order, data: DataConfig, steps: range, shard: Shard = WHOLE, substitutes: Substitutes | None = None
    ) -> Iterator[Batch]:
        """Yield training batches; see `Source.train_batches`. Images are [B, S, S, C] in the config's `PixelFormat`.

        S is `data.image_size`. A process verifies each file to its last pixel when it first reads the file, except for
        files that `verified` marks as sound. With `data.verify="never"`, no file is verified. The iterator raises
        `Unreachable` if the store does not answer within its deadline.
        """
        return self._batches(order, data, steps, shard, substitutes, train=True)

    def eval_batches(
        self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE, omissions: Substitutes | None = None
    ) -> Iterator[Batch]:
        """Yield every example once, its short side resized to `data.resize` and its center cropped; see `Pixels`.

        With `data.resize == data.image_size`, square images are not cropped. By default, an unusable image is an error,
        because a substitute would change the metrics. With `omissions`, another image is read in place of an unusable
        image, and `Batch.substituted` is 1 for that example.

        Raises: see `train_batches` and `check_evaluation`.
        """
        self.check_evaluation(data)
        return self._batches(order, data, range(order.num_batches), shard, omissions, train=False)

    def _batches(self, order: Order, data: DataConfig, steps: range, *more: Any, train: bool) -> Iterator[Batch]:
        # Only batches need OpenCV.
        from jaxddp.data.stream.decode import Pixels
        from jaxddp.data.stream.pipeline import Pipeline

        pixels, verifies = Pixels.of(data, train=train), data.verify != "never"
        return Pipeline(self, order, pixels, steps, *more, verifies=verifies, workers=data.workers).batches()
