"""Which parameters of a network are kernels, and which of their axes are inputs, outputs and stacked layers.

Weight decay, LARS, LAMB and Muon treat kernels differently from biases, scales of norms, class tokens and position
embeddings. The name of an array decides if it is one of Flax's or timm's names. Any other array is a kernel if it has
two or more axes in a single layer. The rank alone would be wrong: the biases of `nn.MultiHeadDotProductAttention` are
[heads, size], and `nn.scan` and `nn.vmap` add an axis to every array.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

Shape = tuple[int, ...]
_POSITION = re.compile("(^|_)pos(_|emb|ition|$)|Pos(Emb|ition)")
_NOT_KERNEL = re.compile(f"(^|_)(bias|scale|gamma|beta|cls|tokens?)(_|$)|{_POSITION.pattern}")
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

    def map(self, function: Callable[..., Any], params: Any, *trees: Any) -> Any:
        """Return a tree of `function(kernel, param, …)`, where `kernel` is None for parameters that are no kernels."""
        return jax.tree_util.tree_map_with_path(
            lambda path, param, *others: function(self.get(name_of(path), param.shape), param, *others), params, *trees
        )

    def mask(self, params: Any) -> Any:
        """Return a tree of bool, True for each kernel."""
        return self.map(lambda kernel, param: kernel is not None, params)


BY_NAME = Kernels()


def name_of(path: Any) -> str:
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
