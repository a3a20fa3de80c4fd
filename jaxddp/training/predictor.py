"""What the network says of a few validation images, the same ones at each evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.order import EvalOrder, Shard
from jaxddp.data.source import Source
from jaxddp.engine.state import TrainState
from jaxddp.mesh import Topology
from jaxddp.training.shown import Shown


@dataclass(frozen=True)
class Predictor:
    """Predicts a source of few images of a state. All processes call it together, and each gets all of it.

    The images are read once, at the first call, as evaluation reads them.

    Attributes:
        program: see `jaxddp.engine.step.make_classify`.
    """

    program: Callable[[TrainState, Batch], tuple[jax.Array, Any]]
    source: Source
    data: DataConfig
    topology: Topology

    def __call__(self, state: TrainState) -> Shown:
        """The predictions of a state. Raises: InputError; an image cannot be used."""
        batch, placed = self._batch
        count, (probabilities, _) = len(self.source), self.program(state, placed)
        found = np.asarray(probabilities)[:count]
        return Shown.of(batch.image[:count], batch.label[:count], found, self.source.class_names)

    @cached_property
    def _batch(self) -> tuple[Batch, Batch]:
        """The images on the host, all of them on every process, and placed."""
        count, devices = len(self.source), self.topology.num_devices
        order = EvalOrder(count, -(-count // devices) * devices)
        whole = next(iter(self.source.eval_batches(order, self.data)))
        own = Shard(self.topology.process_index, self.topology.process_count)
        return whole, self.topology.place(jax.tree.map(own.of, whole))
