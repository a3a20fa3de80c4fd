"""The activations of a network's layers: the names of the layers, and the output of one of them for images.

A layer is a submodule of a Linen or NNX module. Its name is its path, such as "layer3_0/conv2", or its name in
published weights, such as "layer3.0.conv2".
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from jaxddp.core.errors import InputError, nearest, show
from jaxddp.models.adapt import KEPT, Adapted, LinenModel, NNXModel
from jaxddp.models.interface import PARAMS, Model, Tree, by_path, intercepting, name_of, trees_of

if TYPE_CHECKING:
    import flax.nnx

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


def activation(
    model: Model, layer: LayerCall, params: Tree, model_state: Tree, images: jax.Array, change: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (logits [B, K], activation [B, *layer.shape]) of images [B, H, W, C] in evaluation.

    Args:
        model: a model for which `find_layer` or `heat_map_layer` returned the layer.
        change: an array that is added to the activation. Its gradient is the gradient of the activation.
    """
    assert isinstance(model, LinenModel | NNXModel)
    calls = 0

    def call(path: str, own: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal calls
        if path != layer.path:
            return function(*args, **kwargs)
        calls += 1
        value = args[0] if layer.before else function(*args, **kwargs)
        if change is not None and calls == layer.calls:
            value = value + change.astype(value.dtype)
        # A variable, because a Python list could not leave a transformation inside the network, such as `nn.remat`.
        if isinstance(own, nn.Module):
            own.sow(KEPT, KEPT, value, init_fn=lambda: value, reduce_fn=lambda _, last: last)
        else:
            setattr(own, KEPT, flax.nnx.Intermediate(value))
        return function(value, *args[1:], **kwargs) if layer.before else value

    logits, updated = model.run(params, model_state, images, train=False, call=call)
    (value,) = (leaf for path, leaf in tree_leaves_with_path(updated) if KEPT in keystr(path))
    return logits, value


def without_head(model: Model, image_shape: tuple[int, int, int]) -> Any:
    """Return a context in which a network for images [H, W, C] returns the input of its head in place of the logits.

    Raises: see `find_layer`.
    """
    head = find_layer(model.base if isinstance(model, Adapted) else model, image_shape)

    def call(path: str, layer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return args[0] if path == head.path else function(*args, **kwargs)

    return intercepting(call)


def find_layer(model: Model, image_shape: tuple[int, int, int], name: str | None = None) -> LayerCall:
    """Return the layer of a name, or by default the input of the head, for images [H, W, C].

    The head is the last dense layer that returns the logits.

    Raises:
        InputError: the network is no Flax module, or it has no such layer. The message lists similar names.
    """
    layers, heads = _layers(model, image_shape)
    outermost = ", ".join(path for path in layers if not any(path.startswith(f"{other}/") for other in layers))
    if name is None:
        if heads:
            return heads[-1]
        problem = "the network has no dense layer that returns the logits, whose input would be the features"
        raise InputError(problem, advice=f"name a layer: {outermost}")
    of_name = {other: path for path, other in _published_names(model, layers, image_shape).items()}
    path = name if name in layers else of_name.get(name, "")
    if path not in layers:
        hint = nearest(name, [*layers, *of_name]) or f"; there are: {outermost}"
        raise InputError(f"layer {show(name)}: the network has no such layer{hint}")
    if (layer := layers[path]) is None:
        raise InputError(f"layer {show(name)}: its output is no array with an axis of images; give another layer")
    return layer


def heat_map_layer(model: Model, image_shape: tuple[int, int, int]) -> LayerCall:
    """Return the layer whose activation a heat map of Grad-CAM shows.

    It is the layer `heat_map_layer` of a network with this attribute, and otherwise the last layer whose output has the
    shape [B, H, W, C]: in a ResNet or a ConvNeXt, the last block.

    Raises: InputError if the network is no Flax module, or no layer has such an output.
    """
    layers, _ = _layers(model, image_shape)
    named = getattr(getattr(model, "module", None), "heat_map_layer", None)
    if named is not None:
        return find_layer(model, image_shape, named)
    maps = [layer for layer in layers.values() if layer is not None and len(layer.shape) == 3]
    if not maps:
        raise InputError("explain: no layer of the network has an output [B, H, W, C], which a heat map needs")
    return maps[-1]


def _layers(model: Model, image_shape: tuple[int, int, int]) -> tuple[dict[str, LayerCall | None], list[LayerCall]]:
    """Return the calls of all submodules by path, and the inputs of the dense layers that return the logits.

    Both are in the order in which the last calls end. A call is None if its output is no array with an axis of images.
    """
    if not isinstance(model, LinenModel | NNXModel):
        problem = f"the network is an object of type {name_of(type(model))}, whose layers cannot be read"
        raise InputError(problem, advice="give a Linen or NNX module")
    dense = (nn.Dense, nn.DenseGeneral) if isinstance(model, LinenModel) else (flax.nnx.Linear, flax.nnx.LinearGeneral)
    calls, inputs = dict[str, LayerCall | None](), dict[str, LayerCall]()

    def record(path: str, layer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if path:
            before = calls.pop(path, None)
            count, shape = 1 + (before.calls if before else 0), _shape_of_one(output)
            calls[path] = None if shape is None else LayerCall(path, shape, count)
            if isinstance(layer, dense) and (shape := _shape_of_one(*args[:1])):
                inputs[path] = LayerCall(path, shape, count, before=True)
        return output

    def trace(params: Tree, model_state: Tree, images: jax.Array) -> jax.Array:
        return model.run(params, model_state, images, train=False, call=record)[0]

    images = jax.ShapeDtypeStruct((_SEVERAL, *image_shape), jnp.float32)
    logits = _shape_of_one(jax.eval_shape(trace, *trees_of(model, image_shape), images))
    heads = [inputs[path] for path, call in calls.items() if path in inputs and call and call.shape == logits]
    return calls, heads


def _shape_of_one(value: Any = None) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", ())
    return tuple(shape[1:]) if len(shape) > 1 and shape[0] == _SEVERAL else None


def _published_names(model: Model, layers: Iterable[str], image_shape: tuple[int, int, int]) -> dict[str, str]:
    """Return the names of layers in published weights, by path; empty for a network without such names."""
    names_of = getattr(getattr(model, "module", None), "published_names", None)
    if names_of is None:
        return {}
    naming = names_of()[0]
    own = {path.removeprefix(PARAMS).rpartition("/")[0]: path for path in by_path(*trees_of(model, image_shape))}
    # The published name of a layer is that of one of its arrays without the last component. A layer without arrays of
    # its own is given one.
    return {path: naming(own.get(path, f"{PARAMS}{path}/kernel")).rpartition(".")[0] for path in layers}
