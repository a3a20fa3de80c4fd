"""Predictions of a few validation images, which are the same at each evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.order import ChosenOrder, Shard
from jaxddp.data.source import Source
from jaxddp.engine.state import TrainState
from jaxddp.mesh import Topology
from jaxddp.training.validation.predicted_images import PredictedImages


@dataclass(frozen=True)
class ImagePredictor:
    """The predictor of a few images of a source. All processes call it together, and each process gets all predictions.

    The images are read and cropped as for evaluation, once, at the first call.

    Attributes:
        program: see `jaxddp.engine.predictions.make_classify`; with `explains`, see
            `jaxddp.engine.predictions.make_explain`.
        rows: int[n], the rows of the images in the source.
        max_batch_size: the largest number of images in a batch; a multiple of the number of devices.
        explains: whether the program also returns heat maps.
    """

    program: Callable[[TrainState, Batch], tuple[Any, Any]]
    source: Source
    rows: np.ndarray
    data: DataConfig
    topology: Topology
    max_batch_size: int
    explains: bool = False

    def read(self) -> None:
        """Read the images, if they are not in memory yet. Raises: InputError if an image cannot be used."""
        _ = self._batches

    def __call__(self, state: TrainState) -> PredictedImages:
        """Return the predictions of a state. Raises: see `read`."""
        count, shard = len(self.rows), Shard(self.topology.process_index, self.topology.process_count)
        placed = (self.topology.place(jax.tree.map(shard.of, batch)) for batch in self._batches)
        outputs = [self.program(state, batch)[0] for batch in placed]
        values = jax.tree.map(lambda *arrays: np.concatenate([*map(np.asarray, arrays)])[:count], *outputs)
        probabilities, heat_maps = values[:2] if self.explains else (values, None)
        images = np.concatenate([batch.image for batch in self._batches])[:count]
        labels, names = self.source.labels[self.rows], self.source.class_names
        return PredictedImages.of(images, labels, probabilities, names, heat_maps)

    @cached_property
    def _batches(self) -> list[Batch]:
        """The batches of all images, on the host of every process."""
        count, devices = len(self.rows), self.topology.num_devices
        batch_size = min(self.max_batch_size, -(-count // devices) * devices)
        order = ChosenOrder(len(self.source), batch_size, tuple(self.rows.tolist()))
        return [*self.source.eval_batches(order, self.data)]
