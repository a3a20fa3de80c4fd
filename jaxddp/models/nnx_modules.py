"""NNX modules as models. The import of NNX doubles the time of importing Flax, so NNX is imported on first use."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.typing import DTypeLike

from jaxddp.config.layers import NO_LAYERS, Layers
from jaxddp.core.errors import InputError, kind_of
from jaxddp.models.interface import MODE_ARGUMENTS, Tree, call_mode, cast, check_call, like, name_of, signature
from jaxddp.models.ops.operations import Convolution

if TYPE_CHECKING:
    from flax import nnx

Shape = tuple[int, ...]
Path = tuple[Any, ...]
"""The path of a variable in an NNX module, which consists of attribute names and list indices."""


@dataclass(frozen=True, eq=False)
class NNXModel:
    """An NNX module as a `Model`.

    The module is split once. `params` are its `nnx.Param`s, and `model_state` is all other state except random
    streams. Both are nested dicts by attribute name. A list index becomes a string, because checkpoints need string
    keys.

    `init` makes a new module with its key if there is a function that makes it. Otherwise it ignores the key and
    returns copies of the module's values. `apply` builds a module, sets its mode, and seeds every random stream from
    `key`, so random streams are not part of the state.
    """

    module_type: type
    graph: Any
    params: dict[Path, Any]
    state: dict[Path, Any]
    streams: dict[Path, tuple[bool, tuple[int, ...]]]
    """For each array of a random stream: whether the array holds keys (otherwise counts), and its shape."""
    settled: Layers = NO_LAYERS
    """Layers whose batch norms also use their running statistics in training, without updating them."""
    make: Callable[..., Any] | None = None
    """The function of `rngs` that makes the module; None for a module with its own initial values."""
    dtype: DTypeLike | None = None
    """The dtype to which `apply` casts the parameters and the images; None for no cast."""
    convolution: Convolution | None = None
    """The implementation of grouped convolutions; None for XLA's."""
    accepts_convolution: bool = True
    """Whether `jaxddp.models.adapt.for_platform` may set `convolution`."""

    @classmethod
    def of(cls, module: "nnx.Module") -> "NNXModel":
        graph, params, streams, state = _split(module)
        kinds = {path: (_holds_keys(leaf), leaf.shape) for path, leaf in streams.items()}
        return cls(type(module), graph, params, state, kinds)

    @classmethod
    def made_by(cls, make: Callable[..., Any]) -> "NNXModel":
        """Adapt a function of `rngs` that returns a module. Raises: InputError if it returns something else."""
        from flax import nnx

        def made() -> nnx.Module:
            module = make(rngs=nnx.Rngs(0))
            if not isinstance(module, nnx.Module):
                raise InputError(f"model: {name_of(make)}(rngs) returned {kind_of(module)}; return an NNX module")
            return module

        module = nnx.eval_shape(made)
        check_call(type(module))
        return replace(cls.of(module), make=make)

    @property
    def function(self) -> Callable[..., Any]:
        """The function whose arguments set the mode."""
        return self.module_type.__call__

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        if self.make is not None:
            from flax import nnx

            _, params, _, state = _split(self.make(rngs=nnx.Rngs(_typed(key))))
            return _nested(params), _nested(state)
        # Copy, because the training step donates its arguments and would delete the user's arrays.
        params, state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), (self.params, self.state))
        return _nested(params), _nested(state)

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        from flax import nnx

        params, images = cast((params, images), self.dtype)
        leaves = _pick(params, self.params) | _pick(model_state, self.state) | self._seed_streams(key)
        module = nnx.merge(self.graph, traverse_util.unflatten_dict(leaves))
        (module.train if train else module.eval)()
        for path, layer in nnx.iter_modules(module):
            for name, in_training in MODE_ARGUMENTS.items():
                if isinstance(vars(layer).get(name), bool):
                    setattr(layer, name, in_training == train)
            if self.dtype is not None and vars(layer).get("dtype", self.dtype) is None:
                # A norm without a dtype would return float32, the dtype of its running statistics.
                setattr(layer, "dtype", self.dtype)  # noqa: B010
            if train and hasattr(layer, "use_running_average") and "/".join(map(str, path)) in self.settled:
                layer.set_attributes(use_running_average=True)
            if self.convolution and isinstance(layer, nnx.Conv) and layer.feature_group_count > 1:
                is_default = layer.conv_general_dilated is jax.lax.conv_general_dilated
                layer.conv_general_dilated = self.convolution if is_default else layer.conv_general_dilated
        keywords: dict[str, Any] = call_mode(module.__call__, train)
        if "rngs" in signature(module.__call__).parameters:
            keywords["rngs"] = nnx.Rngs(_typed(key))
        logits = module(images, **keywords)
        if not train:
            return logits, model_state
        updated = _arrays(nnx.state(module))
        new_state = _nested({path: updated[path] for path in self.state})
        return logits, new_state if self.dtype is None else like(new_state, model_state)

    def layer_arrays(self, image_shape: tuple[int, int, int]) -> dict[str, tuple[Shape, Shape, Any]]:
        """Return, for each parameter by name, its shape, its shape in a single layer, and the module that owns it.

        The attributes of NNX's layers give the shape in a single layer, without the axes that `nnx.vmap` adds. Any
        other array has the additional axes of the layers in the same module.
        """
        from flax import nnx

        leaves = self.params | self.state | self._seed_streams(None)
        modules = dict(nnx.iter_modules(nnx.merge(self.graph, traverse_util.unflatten_dict(leaves))))
        shapes: dict[Path, Shape] = {path: leaf.shape for path, leaf in self.params.items()}
        inner = {path: _single_shape(modules.get(path[:-1]), path[-1]) for path in shapes}
        single = {path: shape for path, shape in inner.items() if shape is not None}

        def added(path: Path, owner: Path) -> int:
            extra = [len(shapes[p]) - len(single[p]) for p in single if p[: len(owner)] == owner]
            return min(extra) if extra or not owner else added(path, owner[:-1])

        return {
            "/".join(map(str, path)): (shape, single.get(path, shape[added(path, path[:-1]) :]), modules.get(path[:-1]))
            for path, shape in shapes.items()
        }

    def _seed_streams(self, key: jax.Array | None) -> dict[Path, jax.Array]:
        """Return every random stream in its initial state, each with its own key folded from `key`."""
        key, seeded = _typed(key), {}
        for i, (path, (holds_keys, shape)) in enumerate(self.streams.items()):
            stream = jax.random.fold_in(key, i)
            keys = jax.random.split(stream, shape) if shape else stream
            seeded[path] = keys if holds_keys else jnp.zeros(shape, jnp.uint32)
        return seeded


def takes_rngs(function: Any) -> bool:
    """Return whether a class or function can be called as `function(rngs=...)`, and has this argument."""
    if isinstance(function, type):
        function = functools.partial(function)
    if isinstance(function, functools.partial) and isinstance(function.func, type):
        # The signature of an NNX class is that of its metaclass.
        function = functools.partial(function.func.__init__, None, *function.args, **function.keywords)  # pyright: ignore
    try:
        parameters = inspect.signature(function).parameters
        inspect.signature(function).bind(rngs=None)
    except (TypeError, ValueError):
        return False
    return "rngs" in parameters


def _typed(key: jax.Array | None) -> jax.Array:
    """Return a key of type `key<...>`; that of seed 0 for None."""
    key = jax.random.key(0) if key is None else key
    return key if _holds_keys(key) else jax.random.wrap_key_data(key)


def _split(module: "nnx.Module") -> tuple[Any, dict[Path, Any], dict[Path, Any], dict[Path, Any]]:
    """Return the graph of a module, its parameters, the arrays of its random streams, and all other arrays."""
    from flax import nnx

    graph, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
    params, streams, state = map(_arrays, parts)
    return graph, params, streams, state


def _holds_keys(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _arrays(state: "nnx.State") -> dict[Path, Any]:
    from flax import nnx

    return traverse_util.flatten_dict(nnx.to_pure_dict(state))


def _nested(leaves: Mapping[Path, jax.Array]) -> Tree:
    return traverse_util.unflatten_dict({tuple(map(str, path)): leaf for path, leaf in leaves.items()})


def _pick(tree: Tree, paths: Iterable[Path]) -> dict[Path, jax.Array]:
    """Return the leaves of a nested dict by NNX's paths, in which list indices are integers."""
    leaves = traverse_util.flatten_dict(tree)
    # Convert to immutable JAX arrays, because NNX writes in place to a variable that holds a NumPy array.
    return {path: jnp.asarray(leaves[tuple(map(str, path))]) for path in paths}


def _single_shape(layer: Any, name: str) -> Shape | None:
    """Return the shape of a parameter of one of NNX's layers from the attributes of the layer; None if unknown."""
    from flax import nnx

    match layer, name:
        case nnx.LinearGeneral(), "kernel":
            return (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
        case nnx.Linear(), "kernel":
            return (layer.in_features, layer.out_features)
        case nnx.Conv() | nnx.ConvTranspose() | nnx.Einsum(), "kernel":
            return tuple(layer.kernel_shape)
        case nnx.Embed(), "embedding":
            return (layer.num_embeddings, layer.features)
        case ((nnx.BatchNorm() | nnx.LayerNorm()), "scale" | "bias"):
            return (layer.num_features,)
    return None
