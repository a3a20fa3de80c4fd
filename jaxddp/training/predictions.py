"""What the network says of a few validation images, the same ones at each evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.order import EvalOrder, Shard
from jaxddp.data.source import Source
from jaxddp.engine.state import TrainState
from jaxddp.mesh import Topology

SHOWN = 16
"""Of how many images a logger shows the predictions, unless it is told another number."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Images with the class that the network gives each of them.

    Attributes:
        images: uint8 or uint16 [N, H, W, C], as evaluation sees them.
        labels: int[N]; -1 where unknown.
        predicted: int[N], the most probable class.
        probabilities: float[N], of that class.
        class_names: K names.
    """

    images: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray
    class_names: Sequence[str]

    @classmethod
    def of(
        cls, images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray, class_names: Sequence[str]
    ) -> "Predictions":
        """Those of the probabilities of all classes, float[N, K]."""
        return cls(images, labels, probabilities.argmax(-1), probabilities.max(-1), class_names)

    @property
    def wrong(self) -> np.ndarray:
        """bool[N]; where the label is unknown, nothing is wrong."""
        return (self.labels >= 0) & (self.predicted != self.labels)

    @property
    def captions(self) -> list[str]:
        """The predicted class of each image and its probability; for a wrong one, below them the right class."""
        columns = self.labels, self.predicted, self.probabilities, self.wrong
        captions = []
        for label, guess, probability, wrong in zip(*columns, strict=True):
            caption = f"{short(self.class_names[int(guess)])} {probability:.0%}"
            captions.append(f"{caption}\nis {short(self.class_names[int(label)])}" if wrong else caption)
        return captions


@dataclass(frozen=True)
class Predictor:
    """Predicts a source of few images of a state. All processes call it together, and each gets all of it.

    The images are read once, at the first call, as evaluation reads them.

    Attributes:
        program: (state, placed batch) -> the probabilities of its classes, float[B, K], on every device.
    """

    program: Callable[[TrainState, Batch], jax.Array]
    source: Source
    data: DataConfig
    topology: Topology

    def __call__(self, state: TrainState) -> Predictions:
        """The predictions of a state. Raises: InputError; an image cannot be used."""
        batch, placed = self._batch
        count, probabilities = len(self.source), np.asarray(self.program(state, placed))
        return Predictions.of(batch.image[:count], batch.label[:count], probabilities[:count], self.source.class_names)

    @cached_property
    def _batch(self) -> tuple[Batch, Batch]:
        """The images on the host, all of them on every process, and placed."""
        count, devices = len(self.source), self.topology.num_devices
        order = EvalOrder(count, -(-count // devices) * devices)
        whole = next(iter(self.source.eval_batches(order, self.data)))
        own = Shard(self.topology.process_index, self.topology.process_count)
        return whole, self.topology.place(jax.tree.map(own.of, whole))


def drawable(image: np.ndarray) -> np.ndarray:
    """An image of any channels and bits as gray, RGB or RGBA of 8 bits; of other channels the first one or three."""
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    channels = image.shape[-1]
    return image[..., 0] if channels < 3 else image[..., : channels if channels == 4 else 3]


def short(name: str) -> str:
    """The first of a synset's names: "tench, Tinca tinca" is a tench."""
    return name.split(",")[0][:20]
