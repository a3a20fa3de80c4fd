"""The TensorFlow graph of a stream, from the place of an image to its pixels. Equal settings share one traced graph."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.images.header import without_stray_bytes
from jaxddp.data.images.image_types import PixelFormat
from jaxddp.data.images.verify import verify
from jaxddp.data.stream.decode import eval_image, train_image
from jaxddp.data.stream.tensorflow_cpu import tf
from jaxddp.data.stream.windows import Area

MOST_GRAPHS = 16
REFUSED, SOUND, STRAY = range(3)
"""The verdicts that `looked_at` returns."""


@dataclass(frozen=True)
class TrainPixels:
    """Turns an encoded image, a string scalar, and a key, int64[2], into pixels [S, S, C]; see `train_image`."""

    image_size: int
    format: PixelFormat
    area: Area | None

    def __call__(self, encoded: Any, key: Any) -> Any:
        return train_image(encoded, key, self.area, self.image_size, self.format)


@dataclass(frozen=True)
class EvalPixels:
    """Turns an encoded image into the pixels of evaluation, and ignores the key; see `eval_image`."""

    image_size: int
    format: PixelFormat
    resize: int

    def __call__(self, encoded: Any, key: Any) -> Any:
        return eval_image(encoded, self.image_size, self.resize, self.format)


Pixels = TrainPixels | EvalPixels


@functools.lru_cache(maxsize=MOST_GRAPHS)
def pixel_graph(read: Callable[[Any, Any], Any] | None, pixels: Pixels) -> Any:
    """Return a graph function (key, wanted, digest, *place) -> (pixels, verdict); see `looked_at`.

    Args:
        read: the result of `Store.in_graph`. If it is None, `place` is the encoded image itself.
    """
    places = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)][: 2 if read else 1]

    arguments = tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.string)

    @tf.function(input_signature=(*arguments, *places), autograph=False)
    def load(key: Any, look: Any, digest: Any, *place: Any) -> Any:
        image, verdict = looked_at(read(*place) if read else place[0], look, digest)
        shape = pixels.image_size, pixels.image_size, pixels.format.channels
        black = functools.partial(tf.zeros, shape, pixels.format.dtype)
        return tf.cond(verdict == REFUSED, black, lambda: pixels(image, key)), verdict

    return load


def looked_at(data: Any, wanted: Any, digest: Any) -> tuple[Any, Any]:
    """Verify an encoded image; returns it and an int32 verdict.

    The verdict is `REFUSED`, `SOUND`, or `STRAY` for a sound image that is returned without its stray bytes.

    Args:
        wanted: bool scalar, whether to verify the image; if False, only the digest is compared.
        digest: string scalar, the SHA-256 that the image must have; empty if any is accepted.
    """
    held = tf.cond(
        tf.strings.length(digest) > 0,
        lambda: tf.ensure_shape(tf.numpy_function(_held, [data, digest], tf.int32), []),
        lambda: tf.constant(SOUND),
    )
    image, verdict = tf.cond(
        wanted & (held == SOUND),
        lambda: tuple(tf.numpy_function(_looked_at, [data], (tf.string, tf.int32))),
        lambda: (data, held),
    )
    return tf.ensure_shape(image, []), tf.ensure_shape(verdict, [])


def _held(data: bytes, digest: bytes) -> np.int32:
    return np.int32(SOUND if hashlib.sha256(data).digest() == digest else REFUSED)


def _looked_at(data: bytes) -> tuple[bytes, np.int32]:
    try:
        left_over = verify(data).left_over
    except InputError:
        return data, np.int32(REFUSED)
    image = without_stray_bytes(data, left_over)
    return image, np.int32(SOUND if image is data else STRAY)
