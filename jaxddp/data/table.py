"""`ExampleTable`: a `StoredTable` that yields batches."""

from collections.abc import Iterator

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.data.images.image_types import PixelFormat
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard
from jaxddp.data.soundness.bad_images import Omissions, Substitutes
from jaxddp.data.stored_table import StoredTable


class ExampleTable(StoredTable):
    """A table of images in a store that also yields batches."""

    def default_data(self) -> DataConfig:
        return DataConfig()

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        return data.image_size, data.image_size, data.channels

    def image_dtype(self, data: DataConfig) -> np.dtype:
        """The dtype of the pixels: uint8 or uint16."""
        return PixelFormat.of(data).dtype

    def check_evaluation(self, data: DataConfig) -> None:
        if data.image_size > data.resize:
            key = "image_size" if data.eval_size is None else "eval_size"
            raise InputError(
                Key("data.resize", data.resize),
                ": validation crops ",
                Key(f"data.{key}", data.image_size),
                " pixels from images of this short side",
                advice=("set ", Key("data.resize"), f" to {data.image_size} or more (8/7 of it is usual)"),
            )

    def check_resident(self, data: DataConfig) -> None:
        if data.crop == "random_area":
            raise InputError(
                Key("data.cache", "device", '"device"'),
                " with ",
                Key("data.crop", "random_area", '"random_area"'),
                ": random-area crops are made while decoding, and differ in every epoch",
                advice=(
                    *("set ", Key("data.crop"), ' to "whole" (', Key("data.augment.pad"), " crops on the device), or "),
                    *(Key("data.cache"), ' to "none"'),
                ),
            )

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        return None if data.bad_images == "fail" else Substitutes(self)

    # TensorFlow takes seconds to import, so modules that import it are imported inside functions.

    def train_batches(
        self,
        order: Order,
        data: DataConfig,
        steps: range,
        shard: Shard = WHOLE,
        substitutes: Substitutes | None = None,
    ) -> Iterator[Batch]:
        """Yield training batches; see `Source.train_batches`. Images are [B, S, S, C] in the config's `PixelFormat`.

        S is `data.image_size`. A process verifies each file to its last pixel when it first reads the file, except for
        files that `verified` marks as sound. With `data.verify="never"`, no file is verified. The iterator raises
        `Unreachable` if the store does not answer within its deadline.
        """
        from jaxddp.data.stream.graph import TrainPixels
        from jaxddp.data.stream.pipeline import Pipeline
        from jaxddp.data.stream.windows import crop_area

        pixels = TrainPixels(data.image_size, PixelFormat.of(data), crop_area(data), data.interpolation)
        return Pipeline(self, order, pixels, steps, shard, substitutes, data.verify != "never").batches()

    def eval_batches(
        self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE, omissions: Omissions | None = None
    ) -> Iterator[Batch]:
        """Yield every example once, its short side resized to `data.resize` and its center cropped; see `eval_image`.

        With `data.resize == data.image_size`, square images are not cropped. By default, an unusable image is an error,
        because a substitute would change the metrics. With `omissions`, another image is read in place of an unusable
        image, and `Batch.substituted` is 1 for that example.

        Raises: see `train_batches` and `check_evaluation`.
        """
        from jaxddp.data.stream.graph import EvalPixels
        from jaxddp.data.stream.pipeline import Pipeline

        self.check_evaluation(data)
        squash = data.eval_crop == "squash"
        pixels = EvalPixels(data.image_size, PixelFormat.of(data), data.resize, data.interpolation, squash)
        steps, verifies = range(order.num_batches), data.verify != "never"
        return Pipeline(self, order, pixels, steps, shard, omissions, verifies).batches()
