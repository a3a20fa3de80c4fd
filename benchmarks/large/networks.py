"""The sizes of a network on which the projection of large jobs depends."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.large.buckets import compute_seconds
from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.engine.ways.sharded import sharded_axis
from jaxddp.models.adapt import adapt
from jaxddp.models.interface import trees_of

CLASSES, IMAGE = 1000, (224, 224, 3)
DEVICE = "NVIDIA H200"
ARRAYS_OF_ADAMW = 3
"""The parameters and the two moments of AdamW."""
FLOAT32 = 4


@dataclass(frozen=True)
class Network:
    """A network in bfloat16, whose parameters, gradients and optimizer's state are in float32.

    Attributes:
        shapes: the shapes of the parameters.
        model_state_bytes: the bytes of its other arrays, such as running statistics.
        seconds_of_an_image: the seconds of a step's computation for each image, on an H200.
        seconds_of_a_step: the seconds of a step's computation that do not depend on the number of images.
    """

    title: str
    shapes: tuple[tuple[int, ...], ...]
    model_state_bytes: int
    seconds_of_an_image: float
    seconds_of_a_step: float

    @classmethod
    def of(cls, name: str, title: str) -> "Network":
        """Return the network with this name in the registry, for 1,000 classes and images of 224 pixels."""
        config = Config().replace(model={"name": name}, train={"precision": "bfloat16"})
        model = adapt(MODELS.get(name)(config, CLASSES))
        params, model_state = trees_of(model, IMAGE)
        none, one = (compute_seconds(model, params, model_state, (count, *IMAGE), DEVICE) for count in (0, 1))
        assert none is not None and one is not None, DEVICE
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(params))
        return cls(title, shapes, _bytes(model_state), one - none, none)

    def compute(self, images: int) -> float:
        """Return the seconds of a step's computation for a number of images on each device."""
        return self.seconds_of_a_step + images * self.seconds_of_an_image

    @property
    def bytes(self) -> int:
        """The bytes of the parameters, which are also those of the gradients."""
        return FLOAT32 * sum(map(math.prod, self.shapes))

    @property
    def state_bytes(self) -> int:
        """The bytes of the whole state, with AdamW, which a checkpoint has."""
        return ARRAYS_OF_ADAMW * self.bytes + self.model_state_bytes

    def sharded_state_bytes(self, devices: int) -> float:
        """Return the bytes of a device's part of the state, if the optimizer is sharded; see `sharded_axis`."""
        parts = (
            math.prod(shape) / (devices if sharded_axis(shape, devices) is not None else 1) for shape in self.shapes
        )
        return ARRAYS_OF_ADAMW * FLOAT32 * sum(parts) + self.model_state_bytes


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def networks() -> list[Network]:
    return [Network.of("resnet50", "ResNet-50"), Network.of("vit_b16", "ViT-B/16")]
