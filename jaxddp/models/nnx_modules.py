"""NNX modules as models. The import of NNX doubles the time of importing Flax, so NNX is imported on first use."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxddp.models.interface import Tree, call_mode
from jaxddp.sections.layers import NO_LAYERS, Layers

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

    `init` ignores its key and returns copies of the module's values. `apply` builds a module, calls its `train()` or
    `eval()`, and seeds every random stream from `key`, so random streams are not part of the state.
    """

    graph: Any
    params: dict[Path, jax.Array]
    state: dict[Path, jax.Array]
    streams: dict[Path, tuple[bool, tuple[int, ...]]]
    """For each array of a random stream: whether the array holds keys (otherwise counts), and its shape."""
    settled: Layers = NO_LAYERS
    """Layers whose batch norms also use their running statistics in training, without updating them."""

    @classmethod
    def of(cls, module: "nnx.Module") -> "NNXModel":
        from flax import nnx

        graph, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
        params, streams, state = map(_arrays, parts)
        kinds = {path: (_holds_keys(leaf), leaf.shape) for path, leaf in streams.items()}
        return cls(graph, params, state, kinds)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        # Copy, because the training step donates its arguments and would delete the user's arrays.
        params, state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), (self.params, self.state))
        return _nested(params), _nested(state)

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        from flax import nnx

        leaves = _pick(params, self.params) | _pick(model_state, self.state) | self._seed_streams(key)
        module = nnx.merge(self.graph, traverse_util.unflatten_dict(leaves))
        (module.train if train else module.eval)()
        if train and self.settled:
            for path, layer in nnx.iter_modules(module):
                if hasattr(layer, "use_running_average") and "/".join(map(str, path)) in self.settled:
                    layer.set_attributes(use_running_average=True)
        logits = module(images, **call_mode(module.__call__, train))
        if not train:
            return logits, model_state
        updated = _arrays(nnx.state(module))
        return logits, _nested({path: updated[path] for path in self.state})

    def layer_arrays(self, image_shape: tuple[int, int, int]) -> dict[str, tuple[Shape, Shape, Any]]:
        """Return, for each parameter by name, its shape, its shape in a single layer, and the module that owns it.

        The attributes of NNX's layers give the shape in a single layer, without the axes that `nnx.vmap` adds. Any
        other array has the additional axes of the layers in the same module.
        """
        from flax import nnx

        leaves = self.params | self.state | self._seed_streams(None)
        modules = dict(nnx.iter_modules(nnx.merge(self.graph, traverse_util.unflatten_dict(leaves))))
        shapes = {path: leaf.shape for path, leaf in self.params.items()}
        single = {path: shape for path in shapes if (shape := _single_shape(modules.get(path[:-1]), path[-1]))}

        def added(path: Path, owner: Path) -> int:
            sizes = [len(shapes[p]) - len(single[p]) for p in single if p[: len(owner)] == owner]
            return min(sizes) if sizes or not owner else added(path, owner[:-1])

        return {
            "/".join(map(str, path)): (shape, single.get(path, shape[added(path, path[:-1]) :]), modules.get(path[:-1]))
            for path, shape in shapes.items()
        }

    def _seed_streams(self, key: jax.Array | None) -> dict[Path, jax.Array]:
        """Return every random stream in its initial state, each with its own key folded from `key`."""
        key = jax.random.key(0) if key is None else key
        key = key if _holds_keys(key) else jax.random.wrap_key_data(key)
        seeded = {}
        for i, (path, (holds_keys, shape)) in enumerate(self.streams.items()):
            stream = jax.random.fold_in(key, i)
            keys = jax.random.split(stream, shape) if shape else stream
            seeded[path] = keys if holds_keys else jnp.zeros(shape, jnp.uint32)
        return seeded


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
