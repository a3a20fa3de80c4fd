"""The example table: which images there are, where they are and of which class each one is; it reads no image."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.digests import Digests
from jaxddp.data.images.pixel_format import PixelFormat
from jaxddp.data.label_sets import LabelSets
from jaxddp.data.omissions import Omissions
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard
from jaxddp.data.source import Record, in_a_line
from jaxddp.data.storage.store import Store
from jaxddp.data.subset import ClassSelection, balanced_rows, chosen_classes, selected
from jaxddp.data.substitutes import Substitutes
from jaxddp.data.verified import Verified
from jaxddp.errors import InputError
from jaxddp.wording import counted


@dataclass(frozen=True, eq=False)
class ExampleTable:
    """N examples of K classes, as columns; see `Source` for those that every source has."""

    store: Store
    """Where the images are: a directory, record files, an object store."""
    id: np.ndarray
    """bytes 'S'[N], UTF-8."""
    path: np.ndarray
    """bytes 'S'[N], the image's file in the store, with forward slashes, UTF-8."""
    labels: np.ndarray
    class_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    class_indices: tuple[int, ...]
    offset: np.ndarray | None = None
    """int64[N], where in its file an image's record is, for stores whose files hold many."""
    label_sets: LabelSets | None = None
    """The classes of each example, where some are of several, whose label is then -1."""
    made_of: Literal["row", "file", "record"] = "row"
    """What an example is: a row of a table, a file of a folder, a record of a file."""
    digests: Digests | None = None
    """Against which each file is held as it is read; None holds them against nothing."""

    pixel_shape = None

    def __len__(self) -> int:
        return len(self.id)

    def __repr__(self) -> str:
        return in_a_line(self, f"the first is {self.name(0)}" if len(self) else "none")

    @property
    def num_classes(self) -> int:
        return len(self.class_ids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, as hex, of the ids, paths, labels, classes and offsets in their order; wherever the store lies."""
        digest = hashlib.sha256(b"jaxddp example table 1\n")
        class_ids = np.array([class_id.encode() for class_id in self.class_ids], "S")
        for column in (self.id, self.path, class_ids):
            # Padding is not content: a column's width depends on which rows it once held.
            width = int(np.strings.str_len(column).max(initial=1))
            digest.update(b"%d %d\n" % (len(column), width))
            digest.update(column.astype(f"S{width}").tobytes())
        digest.update(self.labels.astype("<i4").tobytes())
        if self.offset is not None:
            digest.update(self.offset.astype("<i8").tobytes())
        if self.label_sets is not None:
            digest.update(repr(self.label_sets.members.tolist()).encode())
        return digest.hexdigest()

    @cached_property
    def verified(self) -> Verified:
        return Verified(self.store, self.path, self.offset)

    def select(self, classes: ClassSelection) -> "ExampleTable":
        if classes is None:
            return self
        sets, within = self.label_sets, self.labels
        if sets is not None:
            within = sets.first_of(chosen_classes(classes, self.class_ids))
        chosen, rows, labels = selected(classes, self.class_ids, within, os.fsdecode(self.path[0]))
        table = replace(
            self.rows(rows),
            labels=labels,
            class_ids=tuple(self.class_ids[i] for i in chosen),
            class_names=tuple(self.class_names[i] for i in chosen),
            class_indices=tuple(self.class_indices[i] for i in chosen),
        )
        return table if sets is None else table.with_label_sets(sets.rows(rows).select(chosen))

    def with_label_sets(self, sets: LabelSets) -> "ExampleTable":
        """The examples with these classes, kept as labels alone where no example has several."""
        return replace(self, labels=sets.labels, label_sets=sets if sets.several.any() else None)

    def take(self, limit: int) -> "ExampleTable":
        return self.rows(balanced_rows(self.labels, limit))

    def name(self, row: int) -> str:
        return self.store.name(*self._place(row))

    def read(self, row: int) -> bytes:
        return self.store.read(*self._place(row))

    def record(self, row: int) -> Record:
        offset = None if self.offset is None else int(self.offset[row])
        return Record(os.fsdecode(self.id[row]), os.fsdecode(self.path[row]), offset)

    def default_data(self) -> DataConfig:
        return DataConfig()

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        return data.image_size, data.image_size, data.channels

    def image_dtype(self, data: DataConfig) -> np.dtype:
        return PixelFormat.of(data).dtype

    def check(self, data: DataConfig) -> None:
        if faults := self.verified.look():
            row, fault = faults[0]
            raise InputError(
                f"{self.name(row)}: {fault} ({len(faults)} of {counted(len(self), 'image')} cannot be used); put "
                "these images back, or take them out of the data set"
            )

    def check_evaluation(self, data: DataConfig) -> None:
        if data.image_size > data.resize:
            key = "image_size" if data.eval_size is None else "eval_size"
            raise InputError(
                f"data.resize={data.resize}: validation crops data.{key}={data.image_size} pixels from images of "
                f"this short side; set data.resize to {data.image_size} or more (8/7 of it is usual)"
            )

    def check_resident(self, data: DataConfig) -> None:
        if data.crop == "random_area":
            raise InputError(
                'data.cache="device" with data.crop="random_area": crops of random area are drawn while decoding, anew '
                'in every epoch; set data.crop to "whole" (data.augment.pad crops on the device), or data.cache to '
                '"none"'
            )

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        return None if data.bad_images == "fail" else Substitutes(self)

    # TensorFlow takes seconds to import, so what needs it is imported where it is used.

    def train_batches(
        self,
        order: Order,
        data: DataConfig,
        steps: range,
        shard: Shard = WHOLE,
        substitutes: Substitutes | None = None,
    ) -> Iterator[Batch]:
        """As `Source.train_batches`, with images [B, S, S, C] of the config's `PixelFormat`, S being `data.image_size`.

        Each file is read to its last pixel the first time that a process meets it, unless `verified` knows it or
        `data.verify` is "never". The iterator raises `Unreachable` where the store gave no answer within its deadline.
        """
        from jaxddp.data.images.graph import TrainPixels
        from jaxddp.data.images.windows import crop_area
        from jaxddp.data.pipeline import Pipeline

        pixels = TrainPixels(data.image_size, PixelFormat.of(data), crop_area(data))
        return Pipeline(self, order, pixels, steps, shard, substitutes, data.verify != "never").batches()

    def eval_batches(
        self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE, omissions: Omissions | None = None
    ) -> Iterator[Batch]:
        """Every example once, its short side resized to `data.resize` and its center cropped; see `eval_image`.

        With `data.resize == data.image_size`, square images stay whole. Bad images end it, unless there are `omissions`
        that take them: then `substituted` is 1 where an image is another's. To replace one in a measurement would make
        the metrics those of another data set. Raises: as `train_batches` and `check_evaluation`.
        """
        from jaxddp.data.images.graph import EvalPixels
        from jaxddp.data.pipeline import Pipeline

        self.check_evaluation(data)
        pixels = EvalPixels(data.image_size, PixelFormat.of(data), data.resize)
        steps, verifies = range(order.num_batches), data.verify != "never"
        return Pipeline(self, order, pixels, steps, shard, omissions, verifies).batches()

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the images of int[n] rows are, for a store's graph: files, bytes 'S'[n], and offsets, int64[n]."""
        files = np.strings.add(os.path.join(os.fsencode(self.store.root or ""), b""), self.path[rows])
        return files, np.zeros(len(rows), np.int64) if self.offset is None else self.offset[rows]

    def rows(self, rows: np.ndarray) -> "ExampleTable":
        """The examples of int[n] rows, in that order."""
        offset = None if self.offset is None else self.offset[rows]
        sets = None if self.label_sets is None else self.label_sets.rows(rows)
        columns = {"id": self.id[rows], "path": self.path[rows], "labels": self.labels[rows]}
        digests = None if self.digests is None else self.digests.rows(rows)
        return replace(self, **columns, offset=offset, label_sets=sets, digests=digests)

    def without(self, rows: Sequence[int]) -> "ExampleTable":
        """All examples but those of some rows. Raises: InputError; none is left."""
        if not rows:
            return self
        left = np.delete(np.arange(len(self)), rows)
        if not len(left):
            raise InputError(f"{self.name(0)}: neither this nor any other {self.made_of} can be used; mend one of them")
        return self.rows(left)

    def without_labels(self) -> "ExampleTable":
        nowhere = np.full(len(self), -1, np.int32)
        return replace(self, labels=nowhere, class_ids=(), class_names=(), class_indices=(), label_sets=None)

    def _place(self, row: int) -> tuple[bytes, int]:
        return bytes(self.path[row]), 0 if self.offset is None else int(self.offset[row])
