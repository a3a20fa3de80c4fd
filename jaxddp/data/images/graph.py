"""A stream's graph in TensorFlow, from the place of an image to its pixels; what makes equal pixels is traced once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxddp.data.images.decode import REFUSED, eval_image, looked_at, train_image
from jaxddp.data.images.pixel_format import PixelFormat
from jaxddp.data.images.windows import Area
from jaxddp.data.tensorflow_cpu import tf

MOST_GRAPHS = 16


@dataclass(frozen=True)
class TrainPixels:
    """From an encoded image, a string scalar, and a key, int64[2], to pixels [S, S, C]; see `train_image`."""

    image_size: int
    format: PixelFormat
    area: Area | None

    def __call__(self, encoded: Any, key: Any) -> Any:
        return train_image(encoded, key, self.area, self.image_size, self.format)


@dataclass(frozen=True)
class EvalPixels:
    """The same for evaluation, whatever the key; see `eval_image`."""

    image_size: int
    format: PixelFormat
    resize: int

    def __call__(self, encoded: Any, key: Any) -> Any:
        return eval_image(encoded, self.image_size, self.resize, self.format)


Pixels = TrainPixels | EvalPixels


@functools.lru_cache(maxsize=MOST_GRAPHS)
def pixel_graph(read: Callable[[Any, Any], Any] | None, pixels: Pixels) -> Any:
    """A function of a key, `looked_at`'s further arguments, and an image's place, to pixels and a verdict.

    Args:
        read: see `Store.in_graph`; where absent, the place is the encoded image itself.
    """
    places = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)][: 2 if read else 1]

    asked = tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.string)

    @tf.function(input_signature=(*asked, *places), autograph=False)
    def load(key: Any, look: Any, digest: Any, *place: Any) -> Any:
        image, verdict = looked_at(read(*place) if read else place[0], look, digest)
        shape = pixels.image_size, pixels.image_size, pixels.format.channels
        black = functools.partial(tf.zeros, shape, pixels.format.dtype)
        return tf.cond(verdict == REFUSED, black, lambda: pixels(image, key)), verdict

    return load
