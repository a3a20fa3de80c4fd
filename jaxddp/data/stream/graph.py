"""The TensorFlow graph that reads, verifies and decodes one image. It is traced once for equal settings."""

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
from jaxddp.data.stream.windows import Area, Interpolation

MOST_GRAPHS = 16
REFUSED, SOUND, STRAY = range(3)
"""The verdicts that `verify_image` returns."""


@dataclass(frozen=True)
class TrainPixels:
    """A function of an encoded image, a string scalar, and a key, int64[2], to pixels [S, S, C]; see `train_image`."""

    image_size: int
    format: PixelFormat
    area: Area | None
    interpolation: Interpolation

    def __call__(self, encoded: Any, key: Any) -> Any:
        return train_image(encoded, key, self.area, self.image_size, self.format, self.interpolation)


@dataclass(frozen=True)
class EvalPixels:
    """A function of an encoded image to the pixels for evaluation; the key is ignored. See `eval_image`."""

    image_size: int
    format: PixelFormat
    resize: int
    interpolation: Interpolation
    squash: bool

    def __call__(self, encoded: Any, key: Any) -> Any:
        size = self.image_size, self.resize
        return eval_image(encoded, *size, self.format, self.interpolation, squash=self.squash)


Pixels = TrainPixels | EvalPixels


@functools.lru_cache(maxsize=MOST_GRAPHS)
def pixel_graph(read: Callable[[Any, Any], Any] | None, pixels: Pixels) -> Any:
    """Return a graph function (key, verifies, digest, *place) -> (pixels, verdict); see `verify_image`.

    Args:
        read: the result of `Store.in_graph`: a function of `place`, which is (path, offset). If `read` is None, `place`
            is the encoded image.
    """
    places = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)][: 2 if read else 1]

    arguments = tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.string)

    @tf.function(input_signature=(*arguments, *places), autograph=False)
    def load(key: Any, verifies: Any, digest: Any, *place: Any) -> Any:
        image, verdict = verify_image(read(*place) if read else place[0], verifies, digest)
        shape = pixels.image_size, pixels.image_size, pixels.format.channels
        black = functools.partial(tf.zeros, shape, pixels.format.dtype)
        return tf.cond(verdict == REFUSED, black, lambda: pixels(image, key)), verdict

    return load


def verify_image(data: Any, verifies: Any, digest: Any) -> tuple[Any, Any]:
    """Verify an encoded image; return the image and an int32 verdict.

    The verdict is `REFUSED`, `SOUND`, or `STRAY`. `STRAY` means that the image is sound after removal of bytes that do
    not belong to it, and the image is returned without these bytes.

    Args:
        verifies: bool scalar, whether to verify the image; if False, only the digest is compared.
        digest: string scalar, the expected SHA-256; empty to accept any digest.
    """
    digest_verdict = tf.cond(
        tf.strings.length(digest) > 0,
        lambda: tf.ensure_shape(tf.numpy_function(_compare_digest, [data, digest], tf.int32), []),
        lambda: tf.constant(SOUND),
    )
    image, verdict = tf.cond(
        verifies & (digest_verdict == SOUND),
        lambda: tuple(tf.numpy_function(_verify_bytes, [data], (tf.string, tf.int32))),
        lambda: (data, digest_verdict),
    )
    return tf.ensure_shape(image, []), tf.ensure_shape(verdict, [])


def _compare_digest(data: bytes, digest: bytes) -> np.int32:
    return np.int32(SOUND if hashlib.sha256(data).digest() == digest else REFUSED)


def _verify_bytes(data: bytes) -> tuple[bytes, np.int32]:
    try:
        left_over = verify(data).left_over
    except InputError:
        return data, np.int32(REFUSED)
    image = without_stray_bytes(data, left_over)
    return image, np.int32(SOUND if image is data else STRAY)
