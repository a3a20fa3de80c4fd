"""The interface between the engine and a network, and the paths of its arrays, such as "params/fc/kernel".

The engine differentiates, averages and saves plain trees of arrays. So a model is two pure functions. A library may
keep the mode, random streams and running statistics in objects; here they are arguments and results.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.config.layers import ADDED, Layers
from jaxddp.core.errors import InputError, kind_of, shaped
from jaxddp.kernels import path_of

Tree = Any  # a pytree of arrays
ImageShape = tuple[int, int, int]  # height, width, channels
Keys = jax.Array | None  # a random key, or one for each image
Outputs = tuple[jax.Array, Tree]  # logits, and the next model state

_IN_TRAINING = ("train", "training", "is_training", "is_train", "train_mode", "training_mode")
_IN_EVALUATION = ("deterministic", "use_running_average", "inference", "inference_mode", "is_inference")
_IN_EVALUATION += ("eval", "eval_mode", "is_eval", "evaluation", "test", "testing", "test_mode", "is_test")
MODE_ARGUMENTS = {name: name in _IN_TRAINING for name in (*_IN_TRAINING, *_IN_EVALUATION)}
"""The names of the arguments, fields and attributes that set a module's mode, with their values in training."""
_MODES = ("train", "training", "fit", "eval", "evaluate", "evaluation", "val", "test", "inference", "infer", "predict")
"""Values of arguments that set a mode by a string."""

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@runtime_checkable
class Model(Protocol):
    """A network as two pure functions that work under jit, grad, eval_shape and shard_map."""

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        """Create (params, model_state) for images like `example`, float[1, H, W, C]. Only `params` is trained."""
        ...

    def apply(self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: Keys) -> Outputs:
        """Map float images [B, H, W, C] to (logits [B, K], model_state).

        `train` is static. In evaluation `model_state` is returned unchanged. All random numbers derive from `key`,
        which may be None if the model uses no random numbers.

        A model may also take `example_keys`: in training, a random key for each image, [B]. An example key depends only
        on the seed, the epoch and the image's row. In contrast, `key` also depends on the device's share of the batch.
        """
        ...


def takes_example_keys(model: Model) -> bool:
    """Return whether `apply` gets `example_keys`.

    `apply` gets the keys if it has this argument, and so has the model's `function`, if any.
    """
    functions = model.apply, getattr(model, "function", model.apply)
    return all("example_keys" in inspect.signature(function).parameters for function in functions)


def call_mode(call: Callable[..., Any], train: bool, **others: Any) -> dict[str, Any]:
    """Return the arguments that `call` has among `others` and those that set the mode, see `MODE_ARGUMENTS`."""
    names = inspect.signature(call).parameters
    values = {name: in_training == train for name, in_training in MODE_ARGUMENTS.items()} | others
    return {name: value for name, value in values.items() if name in names}


def other_switches(call: Callable[..., Any]) -> list[str]:
    """Return the boolean arguments of `call` that do not set the mode, with their defaults, such as "pool=True"."""
    parameters = inspect.signature(call).parameters.values()
    return [f"{p.name}={p.default}" for p in parameters if isinstance(p.default, bool) and p.name not in MODE_ARGUMENTS]


def check_call(module: type) -> None:
    """Raise `InputError` if a class of modules has no `__call__`; see also `check_mode`."""
    call = next((vars(base)["__call__"] for base in module.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        raise InputError(f"model: {name_of(module)} has no method __call__(self, images); define it")
    check_mode(call)


def check_mode(call: Callable[..., Any]) -> None:
    """Raise `InputError` if an argument of `call` sets the mode by another value than a boolean."""
    for p in signature(call).parameters.values():
        is_mode = isinstance(p.default, str) and p.default.lower() in _MODES
        if is_mode or (p.name == "mode" and not isinstance(p.default, str)):
            problem = f"model: {name_of(call)}: the argument {p} would have one value in training and evaluation"
            raise InputError(problem, advice="set the mode by a boolean argument, such as train=False")


def cast(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Cast the floating-point arrays of a tree. None keeps their dtypes."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def as_wide(array: jax.Array) -> jax.Array:
    """Return an array of floats in float32 or wider."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def cast_like(before: Tree, after: Tree) -> Tree:
    """Cast the floats of `after` to the dtypes of `before`, if both have the same structure.

    A network in lower precision computes its next state in that precision. With `jax_enable_x64`, Flax's `BatchNorm`
    creates its statistics in float32 and updates them in float64. A run whose dtypes change cannot be resumed.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        return after

    def like(old: jax.Array, new: jax.Array) -> jax.Array:
        are_floats = all(jnp.issubdtype(array.dtype, jnp.floating) for array in (old, new))
        return new.astype(old.dtype) if are_floats else new

    return jax.tree.map(like, before, after)


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature. Raises: InputError if the function has no signature."""
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise InputError(f"model: {name_of(function)} has no signature; wrap it in a Python function") from error


def check_signature(function: Callable[..., Any], positional: int, keywords: Iterable[str], expected: str) -> None:
    """Raise `InputError` if a function does not accept these positional and keyword arguments."""
    actual = signature(function)
    problem = f"model: {name_of(function)}{actual} does not fit {expected}"
    if isinstance(getattr(function, "__self__", None), nn.Module):
        raise InputError(f"model: {name_of(function)} is a method of a Flax module; give the module itself")
    if any(p.kind is p.VAR_POSITIONAL for p in actual.parameters.values()):
        raise InputError(f"{problem}: it has *args; name its arguments")
    try:
        actual.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        raise InputError(f"{problem}: {error}") from error


def name_of(value: Any) -> str:
    """Return the name of a function, of a class, or of an object's class, for messages."""
    return getattr(value, "__qualname__", type(value).__qualname__)


PARAMS = "params/"
"""The prefix of the paths of parameters, which distinguishes them from paths in the model's state."""


def trees_of(model: Model, image_shape: ImageShape) -> tuple[Any, Any]:
    """Return a network's parameters and state for images [H, W, C], as shapes and dtypes."""
    example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    made = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), example)
    return pair(made, "init", "(params, model_state)")


def pair(result: Any, function: str, expected: str) -> tuple[Any, Any]:
    """Return the two values that a function of a model returned. Raises: InputError if it returned anything else."""
    # The rows of an array, or the keys of a dict, may also be two.
    if not isinstance(result, tuple | list) or len(result) != 2:
        found = shaped(result) if hasattr(result, "shape") else kind_of(result)
        raise InputError(f"the model's {function} returned {found}; return a pair {expected}")
    return result[0], result[1]


def shapes_of(model: Model, image_shape: ImageShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's arrays for images [H, W, C], by path."""
    return {path: leaf.shape for path, leaf in by_path(*trees_of(model, image_shape)).items()}


def by_path(params: Any, model_state: Any) -> dict[str, Any]:
    """Return the arrays of a network by path."""
    return {
        prefix + path_of(path): leaf
        for prefix, tree in ((PARAMS, params), ("", model_state))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def own_arrays(params: Any, model_state: Any) -> dict[str, Any]:
    """Return the arrays of a network by path, without the entries `ADDED` of a training."""
    arrays = by_path(params, model_state).items()
    return {path: leaf for path, leaf in arrays if path.removeprefix(PARAMS).partition("/")[0] not in ADDED}


_MODE = "use_running_average"


def without_frozen(params: Tree, frozen: Layers) -> Tree:
    """Replace the frozen parameters by None."""
    return _select(params, lambda path: path not in frozen) if frozen else params


def with_frozen(partial: Tree, params: Tree) -> Tree:
    """Replace each None in a tree of trained parameters by the entry of `params`."""
    is_none = lambda leaf: leaf is None  # noqa: E731
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, partial, params, is_leaf=is_none)


def with_frozen_state(before: Tree, after: Tree, frozen: Layers, params: Tree) -> Tree:
    """Return the model state `after`, with the state of frozen layers from `before`.

    Without this function, the state of a frozen layer could change in the last bit, because a mean of equal numbers
    over the devices is rounded.
    """
    if not frozen:
        return after
    return with_frozen(_select(after, lambda path: not selects(frozen, path, params)), before)


def selects(layers: Layers, path: str, params: Tree) -> bool:
    """Return whether an array's layer is selected. A path that does not begin with a layer begins with a collection."""
    first, _, rest = path.partition("/")
    return layers.selects(path, *(() if isinstance(params, Mapping) and first in params else (rest,)))


def freeze_norms(frozen: Layers) -> Any:
    """Return a context in which the batch norms of frozen Linen layers use running statistics without updating them."""

    def call(path: str, layer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Batch norms of Flax and of this package have this field. A network may have a call argument of this name,
        # which it passes to its norms.
        if _MODE not in {field.name for field in dataclasses.fields(layer)} or path not in frozen:
            return function(*args, **kwargs)
        if getattr(layer, _MODE, None) is None:
            bound = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs)
            bound.arguments[_MODE] = True
            _, *args = bound.args
            kwargs = bound.kwargs
        else:
            # Linen modules are frozen dataclasses. This instance may be changed, because Linen copied it for this call.
            object.__setattr__(layer, _MODE, True)
        return function(*args, **kwargs)

    return intercepting(call)


Call = Callable[[str, Any, Callable[..., Any], Any, Any], Any]
"""(path, layer, function, args, kwargs) -> what a layer returns in place of `function(*args, **kwargs)`."""


def intercepting(call: Call) -> Any:
    """Return a context in which `call` calls all layers of Linen modules."""

    def intercept(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        is_call = context.method_name == "__call__"
        own = "/".join(context.module.path), context.module
        return call(*own, function, args, kwargs) if is_call else function(*args, **kwargs)

    return nn.intercept_methods(intercept)


def _select(tree: Tree, is_selected: Callable[[str], bool]) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if is_selected(path_of(path)) else None, tree)
