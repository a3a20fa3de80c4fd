"""Which parameters of a network are kernels, and which of their axes are inputs, outputs and stacked layers.

Weight decay, LARS, LAMB and Muon treat kernels differently from biases, scales of norms, class tokens and position
embeddings. The name of an array decides if it is one of Flax's or timm's names. Any other array is a kernel if it has
two or more axes in a single layer. The rank alone would be wrong: the biases of `nn.MultiHeadDotProductAttention` are
[heads, size], and `nn.scan` and `nn.vmap` add an axis to every array.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxddp.config.layers import longest_match
from jaxddp.core.libraries import Lazy

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import optax

    from jaxddp.config import Config
else:
    jax, jnp, optax = Lazy("jax"), Lazy("jax.numpy"), Lazy("optax")

Shape = tuple[int, ...]
_POSITION = re.compile("(^|_)pos(_|emb|ition|$)|Pos(Emb|ition)")
_NOT_KERNEL = re.compile(f"(^|_)(bias|scale|gamma|beta|cls|class_emb(edding)?|tokens?)(_|$)|{_POSITION.pattern}")
"""Names of biases, of the parameters of norms and layer scales, of class tokens, and of position embeddings."""


@dataclass(frozen=True)
class Kernel:
    """The axes of a kernel, in ascending order. Any other axes count the matrices of one layer.

    Attributes:
        stacked: the axes of `nn.scan` and `nn.vmap`. Each index is a layer of its own.
        inputs: the axes over which the layer sums; none for the table of an `nn.Embed`.
        outputs: the axes of the layer's features.
    """

    stacked: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernels:
    """The kernels of a network.

    Attributes:
        known: a parameter's `Kernel`, or None, by its name. The name and the shape decide for other parameters.
    """

    known: Mapping[str, Kernel | None] = field(default_factory=dict)

    @classmethod
    def of_layers(cls, arrays: Mapping[str, tuple[Shape, Shape, Any]]) -> "Kernels":
        """Return the kernels of a module; see `jaxddp.models.adapt.LinenModel.layer_arrays` for the argument."""
        return cls({name: _kernel(name, *array) for name, array in arrays.items()})

    def get(self, name: str, shape: Shape) -> Kernel | None:
        """Return the axes of a parameter, or None if it is no kernel."""
        return self.known[name] if name in self.known else _kernel(name, shape)

    def matrix(self, name: str, shape: Shape) -> Shape | None:
        """Return the shape [stacked, …, inputs, outputs] of a kernel of attention or of a dense layer; else None."""
        kernel = self.get(name, shape)
        # A convolution of images sums over three axes, and an attention's projection over two at most.
        if kernel is None or not 0 < len(kernel.inputs) < 3:
            return None
        inputs, outputs = (math.prod(shape[axis] for axis in axes) for axes in (kernel.inputs, kernel.outputs))
        matrix = (*shape[: kernel.inputs[0]], inputs, outputs)
        is_whole = kernel.inputs < kernel.outputs and math.prod(matrix) == math.prod(shape)
        return matrix if is_whole and min(inputs, outputs) > 1 else None

    def map(self, function: Callable[..., Any], params: Any, *trees: Any) -> Any:
        """Return a tree of `function(kernel, param, …)`, where `kernel` is None for parameters that are no kernels."""
        return jax.tree_util.tree_map_with_path(
            lambda path, param, *others: function(self.get(path_of(path), param.shape), param, *others), params, *trees
        )

    def mask(self, params: Any) -> Any:
        """Return a tree of bool, True for each kernel.

        Kernels have weight decay. Biases and scales have none (He et al. 2018, arXiv:1812.01187, section 3.1). As in
        timm, class tokens and position embeddings have none either.
        """
        return self.map(lambda kernel, param: kernel is not None, params)


BY_NAME = Kernels()
"""The kernels by the names and shapes of parameters alone."""


def add_decay(config: "Config", kernels: Kernels) -> "optax.GradientTransformation":
    """Return a transformation that adds weight decay to the updates of kernels.

    The settings of a layer may set the decay of its kernel. Other kernels have the decay `optimizer.weight_decay`.
    """
    default, by_layer = config.optimizer.weight_decay, config.optimizer.layer_settings.decays
    if not by_layer:
        return optax.add_decayed_weights(default, mask=kernels.mask)

    def add(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        name = path_of(path)
        decay = longest_match(by_layer, name, default) if kernels.get(name, param.shape) else 0.0
        return update + decay * param if decay else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(add, updates, params))


def scale_kernels(kernels: Kernels, coefficient: float = 1.0, epsilon: float = 0.0) -> "optax.GradientTransformation":
    """Return a transformation that multiplies each kernel's update by `coefficient` * |kernel| / (|update| + epsilon).

    Each layer of a stack (`nn.scan`, `nn.vmap`) has norms of its own.
    """

    def scale(kernel: Kernel | None, update: jax.Array, param: jax.Array) -> jax.Array:
        if kernel is None:
            return update
        # `optax.scale_by_trust_ratio` computes each norm twice. On a sharded state, each norm is an all-reduce.
        axes = [axis for axis in range(param.ndim) if axis not in kernel.stacked]
        before, change = (jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True)) for x in (param, update))
        ratio = jnp.where((before == 0) | (change == 0), 1, coefficient * before / (change + epsilon))
        return update * ratio.astype(update.dtype)

    return optax.stateless(lambda updates, params: kernels.map(scale, updates, params))


def matrices(kernel: Kernel | None, param: "jax.Array") -> Any:
    """Return the `MuonDimensionNumbers` of a kernel; None for parameters that are no matrices."""
    return optax.contrib.MuonDimensionNumbers(kernel.inputs, kernel.outputs) if kernel and kernel.inputs else None


def path_of(path: Any) -> str:
    """Return a JAX key path as text, such as "layer1_0/conv1/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _kernel(name: str, shape: Shape, inner: Shape | None = None, layer: Any = None) -> Kernel | None:
    """Return the axes of an array, or None if it is no kernel.

    Args:
        inner: the shape of the array of a single layer; None for `shape`.
        layer: the module that owns the array, if it is known.
    """
    stacked = _removed(shape, shape if inner is None else inner)
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    # "kernel/value" is the array in a box of `nn.with_partitioning`.
    owner, _, own_name = name.removesuffix("/value").rpartition("/")
    if own_name == "embedding":
        is_other = any(map(_POSITION.search, owner.split("/")))
    else:
        is_other = not own_name.endswith("kernel") and _NOT_KERNEL.search(own_name)
    if len(axes) < 2 or is_other:
        return None
    inputs, outputs = _matrix(layer, own_name, tuple(axes))
    return Kernel(stacked, inputs, outputs)


def _removed(shape: Shape, inner: Shape) -> tuple[int, ...]:
    """Return the first axes without which `shape` is `inner`; none if there are no such axes."""
    for removed in itertools.combinations(range(len(shape)), max(len(shape) - len(inner), 0)):
        if inner == tuple(size for axis, size in enumerate(shape) if axis not in removed):
            return removed
    return ()


def _matrix(layer: Any, own_name: str, axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the input axes and the output axes among `axes`, those of a single layer's array."""
    if own_name == "embedding":
        return (), axes
    if own_name != "kernel":
        return axes[:-1], axes[-1:]
    if _is_a(layer, "DenseGeneral", "LinearGeneral"):
        linen = hasattr(layer, "batch_dims")
        features, batch = (layer.features, layer.batch_dims) if linen else (layer.out_features, layer.batch_axis)
        count = len(features) if isinstance(features, tuple | list) else 1
        return axes[len(batch) : -count], axes[-count:]
    if _is_a(layer, "ConvTranspose") and layer.transpose_kernel:
        return (*axes[:-2], axes[-1]), axes[-2:-1]
    if _is_a(layer, "ConvLocal"):
        return axes[-2:-1], axes[-1:]
    if _is_a(layer, "Einsum") and "." not in (equation := (layer.einsum_str or "").replace("...", "")):
        operands, _, result = equation.replace(" ", "").partition("->")
        images, _, kernel = operands.partition(",")
        if result and len(kernel) == len(axes):
            by_label = dict(zip(kernel, axes, strict=True))
            inputs = tuple(axis for label, axis in by_label.items() if label not in result)
            return inputs, tuple(axis for label, axis in by_label.items() if label in result and label not in images)
    return axes[:-1], axes[-1:]


def _is_a(layer: Any, *names: str) -> bool:
    """Return whether a module is of one of Flax's classes of these names, in Linen or NNX."""
    return any(cls.__name__ in names and cls.__module__.startswith("flax.") for cls in type(layer).__mro__)
