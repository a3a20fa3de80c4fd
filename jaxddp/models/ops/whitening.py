"""Initialize the first convolution from images, so that it whitens their patches.

The features of the convolution are the principal components of the patches, each divided by its standard deviation, and
the negatives of these features. Sources: Page 2019, "How to train your ResNet 8: bag of tricks" (whitening); Jordan
2024 (arXiv:2404.00498), section 3.2 (the negatives).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers

EPSILON = 5e-4
"""A constant that is added to variances, because many patches are nearly constant."""
_IMAGES_AT_ONCE = 32


def patch_moments(images: np.ndarray, size: int, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Return the mean product of each pair of values of a normalized patch: float64[D, D], D = size * size * C.

    A patch has the layout of a kernel, [size, size, C]. Pixels are summed as integers, so the result has the same bits
    on every machine. (With 16-bit pixels this holds for images of up to 256x256 pixels.)

    Args:
        images: uint8 or uint16 [N, H, W, C].
        mean, std: the mean and standard deviation of each channel, as in `DataConfig`.

    Raises:
        InputError: the images are floats.
    """
    if not np.issubdtype(images.dtype, np.integer):
        raise InputError(f"images of {images.dtype}: the whitening of the first layer needs uint8 or uint16")
    count, height, width, channels = images.shape
    rows, columns = height - size + 1, width - size + 1
    length = size * size * channels
    products, sums = np.zeros((length, length), np.int64), np.zeros(length, np.int64)
    for start in range(0, count, _IMAGES_AT_ONCE):
        # The products are computed in float64 for speed. The sums of these few products are exact in float64.
        chunk = images[start : start + _IMAGES_AT_ONCE].astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(chunk, (size, size), axis=(1, 2))
        patches = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, length)
        products += (patches.T @ patches).astype(np.int64)
        sums += (np.ones(len(patches)) @ patches).astype(np.int64)
    total = count * rows * columns
    # A single value applies to all channels.
    shifts, scales = (np.broadcast_to(np.asarray(values)[:channels], channels) for values in (mean, std))
    scale = 1 / (np.iinfo(images.dtype).max * np.tile(scales, size * size))
    shift = np.tile(shifts / scales, size * size)
    first = sums / total * scale
    return products / total * np.outer(scale, scale) - np.outer(first, shift) - np.outer(shift, first - shift)


def whitening_kernel(moments: np.ndarray, channels: int) -> np.ndarray:
    """Compute the kernel, float64[size, size, C, 2 D], from `patch_moments`. The lowest variances come first."""
    variances, components = np.linalg.eigh(moments)
    whitened = components / np.sqrt(variances + EPSILON)
    size = round((len(moments) / channels) ** 0.5)
    return np.concatenate([whitened, -whitened], axis=1).reshape(size, size, channels, -1)


def initialize_whitening(
    name: str, images: Callable[[], np.ndarray], mean: Sequence[float], std: Sequence[float]
) -> Callable[..., tuple[Any, Any]]:
    """Return a transform (see `jaxddp.engine.initial_state.make_init`) that sets the first kernel of a network.

    Args:
        name: the name of the first convolution, whose kernel is [size, size, C, 2 size * size * C].
        images: a function that returns uint8[N, H, W, C]. Process 0 calls this function when the parameters are
            initialized, and sends the kernel to the other processes.
        mean, std: the mean and standard deviation of each channel, as in `DataConfig`.

    Raises:
        InputError: when the parameters are initialized, if the network has no such convolution.
    """

    def transform(params: Any, model_state: Any, peers: Peers = ALONE) -> tuple[Any, Any]:
        if "kernel" not in params.get(name, {}):
            raise InputError(f"this network has no convolution {name!r}; give the name of its first convolution")
        kernel = params[name]["kernel"]

        def compute() -> str:
            moments = patch_moments(images(), kernel.shape[0], mean, std)
            return json.dumps(whitening_kernel(moments, kernel.shape[2]).tolist())

        # Only process 0 computes the kernel, because eigenvectors differ between processor types, for example in their
        # signs.
        whitened = jnp.asarray(json.loads(peers.from_first("whitening kernel", compute)), kernel.dtype)
        return {**params, name: {**params[name], "kernel": whitened}}, model_state

    return transform
