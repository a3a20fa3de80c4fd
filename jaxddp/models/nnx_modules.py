"""NNX modules as models. NNX takes as long to import as all the rest of Flax, so it is imported on first use."""

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

Path = tuple[Any, ...]  # where a variable is in an NNX module: names and list indices


@dataclass(frozen=True, eq=False)
class NNXModel:
    """An NNX module, taken apart once: `params` are its `nnx.Param`s, `model_state` all else but random streams.

    Both are nested dicts under the module's own attribute names; a list's indices become strings, as checkpoints want.
    `init` ignores its key: an NNX module already has its values, and copies of those are returned. Each `apply` builds
    a module, calls its `train()` or `eval()`, and seeds every random stream from `key`, so that none is state.
    """

    graph: Any
    params: dict[Path, jax.Array]
    state: dict[Path, jax.Array]
    streams: dict[Path, tuple[bool, tuple[int, ...]]]
    """Of each array of a random stream: whether it holds keys (else counts), and its shape."""
    settled: Layers = NO_LAYERS
    """Whose batch norms use and keep their running statistics in training, too."""

    @classmethod
    def of(cls, module: "nnx.Module") -> "NNXModel":
        from flax import nnx

        graph, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
        params, streams, state = map(_arrays, parts)
        kinds = {path: (_holds_keys(leaf), leaf.shape) for path, leaf in streams.items()}
        return cls(graph, params, state, kinds)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        # Copies: the training step donates its arguments, and would delete the user's own arrays.
        params, state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), (self.params, self.state))
        return _nested(params), _nested(state)

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        from flax import nnx

        leaves = _pick(params, self.params) | _pick(model_state, self.state) | self._seeded(key)
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

    def _seeded(self, key: jax.Array | None) -> dict[Path, jax.Array]:
        """Every random stream from its start, each with its own fold of `key`."""
        key = jax.random.key(0) if key is None else key
        key = key if _holds_keys(key) else jax.random.wrap_key_data(key)
        begun = {}
        for i, (path, (holds_keys, shape)) in enumerate(self.streams.items()):
            stream = jax.random.fold_in(key, i)
            keys = jax.random.split(stream, shape) if shape else stream
            begun[path] = keys if holds_keys else jnp.zeros(shape, jnp.uint32)
        return begun


def _holds_keys(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _arrays(state: "nnx.State") -> dict[Path, Any]:
    from flax import nnx

    return traverse_util.flatten_dict(nnx.to_pure_dict(state))


def _nested(leaves: Mapping[Path, jax.Array]) -> Tree:
    return traverse_util.unflatten_dict({tuple(map(str, path)): leaf for path, leaf in leaves.items()})


def _pick(tree: Tree, paths: Iterable[Path]) -> dict[Path, jax.Array]:
    """The leaves of a nested dict under NNX's own paths, whose list indices are integers."""
    leaves = traverse_util.flatten_dict(tree)
    # As jax arrays, which cannot change: a variable that holds a NumPy array would be written to in place.
    return {path: jnp.asarray(leaves[tuple(map(str, path))]) for path in paths}
