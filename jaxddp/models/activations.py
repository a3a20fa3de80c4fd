"""The activations of a network's layers: the names of the layers, and the output of one of them for images.

A layer is a submodule of a Flax Linen module. Its name is its path, such as "layer3_0/conv2", or its name in published
weights, such as "layer3.0.conv2".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, nearest, show
from jaxddp.models.adapt import LinenModel
from jaxddp.models.interface import PARAMS, Model, Tree, by_path, name_of, trees_of

HEAD = None
"""In place of the name of a layer: the input of the head, which is the last dense layer that returns the logits."""
_COLLECTION, _NAME = "jaxddp_activations", "jaxddp_activation"
_SEVERAL = 2
"""The number of images of a trace. With several images, an axis of images is distinguished from an axis of length 1."""


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer of a network for images, whose output or input is the activation.

    Attributes:
        path: the path of the submodule.
        shape: the shape of its output for one image, [...].
        calls: the number of calls for a batch. The activation is that of the last call.
        before: whether the activation is the input of the layer instead of its output.
    """

    path: str
    shape: tuple[int, ...]
    calls: int = 1
    before: bool = False

    def __repr__(self) -> str:
        return f"LayerCall({'input of ' if self.before else ''}{self.path}, {list(self.shape)})"


def activation(
    model: Model, layer: LayerCall, params: Tree, model_state: Tree, images: jax.Array, change: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (logits [B, K], activation [B, *layer.shape]) of images [B, H, W, C] in evaluation.

    Args:
        model: a model for which `find_layer` or `heat_map_layer` returned the layer.
        change: an array that is added to the activation. Its gradient is the gradient of the activation.
    """
    assert isinstance(model, LinenModel)
    calls = 0

    def call(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        nonlocal calls
        if context.method_name != "__call__" or "/".join(context.module.path) != layer.path:
            return function(*args, **kwargs)
        calls += 1
        value = args[0] if layer.before else function(*args, **kwargs)
        if change is not None and calls == layer.calls:
            value = value + change.astype(value.dtype)
        # A variable, because a Python list could not leave a transformation inside the network, such as `nn.remat`.
        context.module.sow(_COLLECTION, _NAME, value)
        return function(value, *args[1:], **kwargs) if layer.before else value

    with nn.intercept_methods(call):
        logits, updated = model.run(params, model_state, images, train=False, mutable=[*model_state, _COLLECTION])
    (values,) = jax.tree.leaves(updated[_COLLECTION], is_leaf=lambda node: isinstance(node, tuple))
    return logits, values[-1]


def find_layer(model: Model, image_shape: tuple[int, int, int], name: str | None = HEAD) -> LayerCall:
    """Return the layer of a name, or for `HEAD` the input of the head, for images [H, W, C].

    Raises:
        InputError: the network is no Linen module, or it has no such layer. The message lists similar names.
    """
    layers = _layers(model, image_shape)
    if name is None:
        return _head(layers)
    of_name = {other: path for path, other in _published_names(model, layers, image_shape).items()}
    path = name if name in layers else of_name.get(name, "")
    if path not in layers:
        known = [*layers, *of_name]
        hint = nearest(name, known) or f"; there are: {', '.join(_outermost(layers))}"
        raise InputError(f"layer {show(name)}: the network has no such layer{hint}")
    layer = layers[path].layer
    if layer is None:
        raise InputError(f"layer {show(name)}: its output is no array with an axis of images; give another layer")
    return layer


def heat_map_layer(model: Model, image_shape: tuple[int, int, int]) -> LayerCall:
    """Return the layer whose activation a heat map of Grad-CAM shows.

    It is the layer `heat_map_layer` of a network with this attribute, and otherwise the last layer whose output has the
    shape [B, H, W, C]: in a ResNet or a ConvNeXt, the last block.

    Raises:
        InputError: the network is no Linen module, or no layer has such an output.
    """
    layers = _layers(model, image_shape)
    named = getattr(getattr(model, "module", None), "heat_map_layer", None)
    if named is not None:
        return find_layer(model, image_shape, named)
    maps = [call.layer for call in layers.values() if call.layer is not None and len(call.layer.shape) == 3]
    if not maps:
        raise InputError("explain: no layer of the network has an output [B, H, W, C], which a heat map needs")
    return maps[-1]


@dataclass
class _Call:
    """The last call of a submodule. `layer` is None if its output is no array with an axis of images."""

    layer: LayerCall | None
    input_shape: tuple[int, ...] | None
    is_head: bool


def _layers(model: Model, image_shape: tuple[int, int, int]) -> dict[str, _Call]:
    """Return the calls of all submodules by path, in the order in which their last calls end."""
    if not isinstance(model, LinenModel):
        kind = name_of(type(model))
        raise InputError(
            f"the network is an object of type {kind}, whose layers cannot be read; give a Flax Linen module"
        )
    calls = dict[str, _Call]()
    params, model_state = trees_of(model, image_shape)

    def record(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        output, path = function(*args, **kwargs), "/".join(context.module.path)
        if context.method_name == "__call__" and path:
            before = calls.pop(path, None)
            count = 1 + (before.layer.calls if before and before.layer else 0)
            shape = _shape_of_one(output)
            layer = None if shape is None else LayerCall(path, shape, count)
            is_dense = isinstance(context.module, nn.Dense | nn.DenseGeneral)
            calls[path] = _Call(layer, _shape_of_one(args[0]) if args else None, is_dense)
        return output

    def trace(params: Tree, model_state: Tree, images: jax.Array) -> jax.Array:
        with nn.intercept_methods(record):
            return model.apply(params, model_state, images, train=False, key=None)[0]

    images = jax.ShapeDtypeStruct((_SEVERAL, *image_shape), jnp.float32)
    logits = _shape_of_one(jax.eval_shape(trace, params, model_state, images))
    for call in calls.values():
        call.is_head = call.is_head and call.layer is not None and call.layer.shape == logits
    return calls


def _shape_of_one(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", ())
    return tuple(shape[1:]) if len(shape) > 1 and shape[0] == _SEVERAL else None


def _head(layers: Mapping[str, _Call]) -> LayerCall:
    heads = [call for call in layers.values() if call.is_head and call.input_shape]
    if not heads:
        raise InputError(
            "the network has no dense layer that returns the logits, whose input would be the features; name a layer: "
            + ", ".join(_outermost(layers))
        )
    layer, shape = heads[-1].layer, heads[-1].input_shape
    assert layer is not None and shape is not None
    return LayerCall(layer.path, shape, layer.calls, before=True)


def _outermost(layers: Mapping[str, _Call]) -> list[str]:
    return [path for path in layers if "/" not in path]


def _published_names(model: Model, layers: Mapping[str, _Call], image_shape: tuple[int, int, int]) -> dict[str, str]:
    """Return the names of layers in published weights, by path; empty for a network without such names."""
    names_of = getattr(getattr(model, "module", None), "published_names", None)
    if names_of is None:
        return {}
    naming = names_of()[0]
    own = {path.removeprefix(PARAMS).rpartition("/")[0]: path for path in by_path(*trees_of(model, image_shape))}
    # The published name of a layer is that of one of its arrays without the last component. A layer without arrays of
    # its own is given one.
    arrays = {path: own.get(path, f"{PARAMS}{path}/kernel") for path in layers}
    return {path: naming(array).rpartition(".")[0] for path, array in arrays.items()}
