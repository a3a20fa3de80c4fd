"""The small convolutional networks of the CIFAR-10 speedruns, in Flax Linen.

Source: Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (arXiv:2404.00498), section 3, and the scripts of
github.com/KellerJordan/cifar10-airbench. `airbench94`, `airbench95` and `airbench96` are the networks of the paper, and
`airbench` is that of the later variant with Muon. The first convolution is not trained. `initialize_whitening`
initializes this convolution from images.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxddp.core.errors import InputError, Key
from jaxddp.core.peers import ALONE, Peers
from jaxddp.models.network import RunNetwork, check_sides
from jaxddp.models.ops.batch_norm import BatchNorm
from jaxddp.models.ops.layers import Operations, patch_init

WHITENING = "whiten"
"""The name of the first convolution: `kernel` [2, 2, C, 8 C] and `bias` [8 C]."""
_LEAST_SIDE = 9
# GELU is approximated with tanh, because in JAX 0.12 the gradient of erf fails inside `shard_map`.
_gelu = functools.partial(nn.gelu, approximate=True)


class Architecture(NamedTuple):
    """The differences between the networks.

    Attributes:
        widths: the number of features of each stage, as multiples of the first.
        depth: the number of convolutions of each stage. The last two of three have a residual connection.
        statistics_momentum: the decay of the running statistics of batch norm.
        divisor: the divisor of the logits of a head with PyTorch's default initialization. If None, the head has
            weights of variance 1, and the divisor is the number of its inputs.
    """

    widths: tuple[int, int, int] = (1, 4, 4)
    depth: int = 2
    statistics_momentum: float = 0.6
    divisor: float | None = 9


ARCHITECTURES = {
    "airbench": Architecture(divisor=None),
    "airbench94": Architecture(),
    "airbench95": Architecture((1, 3, 3)),
    "airbench96": Architecture((1, 3, 4), depth=3, statistics_momentum=0.9),
}


def parameter_groups(params: Any) -> Any:
    """Label each parameter for `optax.partition`.

    Returns:
        A tree with one of the labels "convolution", "norm", "head", "whitening" (the fixed kernel) and
        "whitening bias" for each parameter.

    Raises: InputError if a parameter belongs to another network.
    """

    def group(path: Any, _: Any) -> str:
        module, kind = (key.key for key in path[:2])
        if module == WHITENING:
            return "whitening" if kind == "kernel" else "whitening bias"
        label = {"conv": "convolution", "norm": "norm", "head": "head"}.get(module.rstrip("_0123456789"))
        if label is None:
            problem = f"{module}/{kind} is not a parameter of the network airbench"
            raise InputError(problem, advice=("set ", Key("model.name"), " to airbench"))
        return label

    return jax.tree_util.tree_map_with_path(group, params)


def identity_like(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Initialize a kernel [k, k, C, F], with odd k, whose first min(C, F) features copy the input channels.

    The other features have PyTorch's default initialization, which is uniform with variance 1 / (3 fan-in).
    """
    kernel = patch_init(key, shape, dtype)
    center, same = shape[0] // 2, jnp.arange(min(shape[2:]))
    return kernel.at[..., same].set(0).at[center, center, same, same].set(1)


def global_max(images: jax.Array) -> jax.Array:
    """Return the largest value of each channel: [B, H, W, C] -> [B, C]. Of equal values, the first has the gradient.

    The gradient of `jnp.max` compares the values with the maximum, and divides by the number of equal ones. If XLA
    computes the values again with other rounding, no value is equal, and the gradient is NaN: on 8 CPU devices with one
    image each, it was.
    """
    pixels = images.reshape(images.shape[0], -1, images.shape[-1])
    first = jax.lax.stop_gradient(pixels).argmax(1, keepdims=True)
    return jnp.where(jnp.arange(pixels.shape[1])[:, None] == first, pixels, 0).sum(1)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Sample from the uniform distribution with mean 0 and variance 1."""
    return jax.random.uniform(key, shape, dtype, -(3**0.5), 3**0.5)


class Airbench(RunNetwork):
    """A whitening convolution, three stages, a global maximum, and a linear head.

    A stage has 3x3 convolutions. A max pooling after its first convolution halves the height and the width.

    Attributes:
        width: the number of features of the first stage.
    """

    num_classes: int
    width: int = 64
    architecture: Architecture = ARCHITECTURES["airbench"]

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Map normalized images [B, H, W, C], H and W at least 9, to logits [B, num_classes] in float32 or wider."""
        check_sides("airbench", images, _LEAST_SIDE)
        operations = self.operations or Operations()
        # A 2x2 convolution without padding, whose kernel has no gradient.
        whitening = {"padding": "VALID", "kernel_init": patch_init, "conv_general_dilated": _convolve_fixed_kernel}
        whiten = nn.Conv(8 * images.shape[-1], (2, 2), name=WHITENING, **whitening, **self.dtypes)
        options = {"padding": 1, "use_bias": False, "kernel_init": identity_like, **self.dtypes}
        options["conv_general_dilated"] = operations.conv_general_dilated(1, 1)
        x = _gelu(whiten(images.astype(self.dtype)))
        for stage, multiple in enumerate(self.architecture.widths, start=1):
            first = x
            for number in range(1, self.architecture.depth + 1):
                x = nn.Conv(multiple * self.width, (3, 3), name=f"conv{stage}_{number}", **options)(x)
                x = operations.max_pool(x, 2, 2, 0) if number == 1 else x
                x = self.norm(train, f"norm{stage}_{number}")(x)
                x = _gelu(x + first if number == 3 else x)
                first = x if number == 1 else first
        x = global_max(x).astype(self.wide["dtype"])
        divisor = self.architecture.divisor
        init = _uniform if divisor is None else patch_init
        head = self.dense(self.num_classes, "head", use_bias=False, kernel_init=init, **self.wide)
        return head(x) / (divisor or x.shape[-1])

    def norm(self, train: bool, name: str) -> nn.Module:
        """Return a batch norm with a bias and no scale.

        The paper uses an epsilon of 1e-12. Here epsilon is Flax's 1e-5, because the rounding error of Flax's fast
        variance is larger than 1e-12.
        """
        momentum = self.architecture.statistics_momentum
        settings: dict[str, Any] = {"momentum": momentum, "use_running_average": not train, "name": name}
        settings |= self.dtypes
        if self.group is None:
            return nn.BatchNorm(use_scale=False, axis_name=self.axis_name, **settings)
        # Flax's batch norm has no ghost batches.
        custom_gradient = (self.operations or Operations()).custom_norm_gradient
        return BatchNorm(scale_init=None, group=self.group, custom_gradient=custom_gradient, **settings)


def _convolve_fixed_kernel(images: jax.Array, kernel: jax.Array, *settings: Any, **more: Any) -> jax.Array:
    return jax.lax.conv_general_dilated(images, jax.lax.stop_gradient(kernel), *settings, **more)


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

    Raises: InputError if the images are floats.
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
