"""A few images with what a network says of them, and how pixels and names are shown to people."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.config import Config
from jaxddp.core.wording import counted

MOST_SHOWN = 1000
"""Images of a picture."""
SHOWN = 16
"""Of how many images a logger shows the predictions, unless it is told another number."""


def images_to_show(config: Config) -> int:
    """How many images a config has the loggers show that show them by themselves."""
    return SHOWN if config.log.images is None else config.log.images


@dataclass(frozen=True, eq=False)
class PredictedImages:
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
    ) -> "PredictedImages":
        """Those of the probabilities of all classes, float[N, K]."""
        return cls(images, labels, probabilities.argmax(-1), probabilities.max(-1), class_names)

    def __repr__(self) -> str:
        return f"PredictedImages({counted(len(self.images), 'image')}, {self.wrong.sum():,} wrong)"

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


def drawable(image: np.ndarray) -> np.ndarray:
    """An image of any channels and bits as gray, RGB or RGBA of 8 bits; of other channels the first one or three."""
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    channels = image.shape[-1]
    return image[..., 0] if channels < 3 else image[..., : channels if channels == 4 else 3]


def short(name: str) -> str:
    """The first of a synset's names: "tench, Tinca tinca" is a tench."""
    return name.split(",")[0][:20]
