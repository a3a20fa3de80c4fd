"""A few images with their predicted classes, and the conversion of pixels and class names for display."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.config import Config
from jaxddp.core.wording import counted

MAX_SHOWN = 1000
"""The largest number of images in a picture."""
DEFAULT_SHOWN = 16
"""The default number of images whose predictions a logger shows."""


def images_to_show(config: Config) -> int:
    """Return the number of images that Weights & Biases and MLflow show for a config."""
    return DEFAULT_SHOWN if config.log.images is None else config.log.images


@dataclass(frozen=True, eq=False)
class PredictedImages:
    """Images with their predicted classes.

    Attributes:
        images: uint8 or uint16 [N, H, W, C], cropped as for evaluation.
        labels: int[N]; -1 where unknown.
        predicted: int[N], the most probable class.
        probabilities: float[N], the probability of that class.
        class_names: the names of the K classes.
        heat_maps: float[N, H, W], 0 or more; the pixels that the predictions depend on. None without heat maps.
    """

    images: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray
    class_names: Sequence[str]
    heat_maps: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        images: np.ndarray,
        labels: np.ndarray,
        probabilities: np.ndarray,
        class_names: Sequence[str],
        heat_maps: np.ndarray | None = None,
    ) -> "PredictedImages":
        """Return the object for the probabilities of all classes, float[N, K]."""
        return cls(images, labels, probabilities.argmax(-1), probabilities.max(-1), class_names, heat_maps)

    def __repr__(self) -> str:
        return f"PredictedImages({counted(len(self.images), 'image')}, {self.wrong.sum():,} wrong)"

    @property
    def wrong(self) -> np.ndarray:
        """bool[N], whether the prediction is wrong; False where the label is unknown."""
        return (self.labels >= 0) & (self.predicted != self.labels)

    @property
    def captions(self) -> list[str]:
        """The predicted class of each image and its probability; for a wrong prediction, also the true class."""
        columns = self.labels, self.predicted, self.probabilities, self.wrong
        captions = []
        for label, guess, probability, wrong in zip(*columns, strict=True):
            caption = f"{short_class_name(self.class_names[int(guess)])} {probability:.0%}"
            captions.append(f"{caption}\nis {short_class_name(self.class_names[int(label)])}" if wrong else caption)
        return captions


def to_drawable(image: np.ndarray) -> np.ndarray:
    """Return an image as 8-bit gray, RGB or RGBA. Of 2 channels, the first is used; of 5 or more, the first three.

    The smallest number of a normalized image becomes black, and its largest white.
    """
    if np.issubdtype(image.dtype, np.floating):
        low, high = image.min(), image.max()
        image = ((image - low) * (255 / max(high - low, np.finfo(np.float32).tiny))).astype(np.uint8)
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    channels = image.shape[-1]
    return image[..., 0] if channels < 3 else image[..., : channels if channels == 4 else 3]


def short_class_name(name: str) -> str:
    """Return the first name of a synset, at most 20 characters: "tench" for "tench, Tinca tinca"."""
    return name.split(",")[0][:20]
