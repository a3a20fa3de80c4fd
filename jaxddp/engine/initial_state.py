"""Create the training state at step 0, with fresh parameters or given weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.core.errors import InputError, kind_of
from jaxddp.engine.compilation import options_of_one_call
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_PARAMS, TrainState, first_difference
from jaxddp.engine.ways.way import Way
from jaxddp.kernels import path_of
from jaxddp.mesh import Topology
from jaxddp.models.adapt import Adapted, without_adapters
from jaxddp.models.interface import PARAMS, Model

NO_OPTIMIZER = optax.identity()
"""The optimizer of a state that is only evaluated: it has no state of its own."""
Transform = Callable[..., tuple[Any, Any]]
"""(params, model_state) -> (params, model_state) with the same names, shapes and dtypes. A function with an argument
`peers` also gets the job's `jaxddp.core.peers.Peers`."""


def make_init(
    model: Model,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, int, int],
    topology: Topology,
    *,
    parts: Sequence[Part] = (),
    transform: Transform | None = None,
    way: Way | None = None,
) -> Callable[..., TrainState]:
    """Compile (on first use) the initialization of a state.

    The result is a function of a random key and, optionally, of weights. Weights are arrays by path ("params/…", or the
    path in the model's state) that replace the fresh arrays. The function is one compiled program, so a deep network is
    initialized in seconds.

    Args:
        image_shape: (H, W, C) of the images.
        transform: a function that changes the fresh arrays, for example to initialize from data. It is called before
            weights replace arrays, and before the optimizer and the parts are initialized. JAX traces it. It must
            return the same values on every process, and keep names, shapes and dtypes.
        way: places the state on the devices. Default: every device holds it.

    Raises:
        InputError: on first use, if `transform` changes a name, shape or dtype (the message names the first array), or
            if two parts keep parameters for evaluation.
    """

    def init(key: jax.Array, weights: Mapping[str, jax.Array] | None = None) -> TrainState:
        network = model.base if isinstance(model, Adapted) else model
        params, model_state = network.init(key, jnp.zeros((1, *image_shape), jnp.float32))
        if transform is not None:
            params, model_state = _transformed(transform, params, model_state, topology)
        params, model_state = replace_by_weights(params, model_state, weights or {})
        params = model.with_adapters(params, key) if isinstance(model, Adapted) else params
        arrays_of = {part.name: part.init(params, model_state) for part in parts}
        part_arrays = {name: arrays for name, arrays in arrays_of.items() if arrays is not None}
        if len(both := [name for name, arrays in part_arrays.items() if EVAL_PARAMS in arrays]) > 1:
            problem = f"the parts {both[0]!r} and {both[1]!r} both keep parameters for evaluation"
            raise InputError(problem, advice="leave one out")
        return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), part_arrays)

    # The program runs once, so it is optimized less. It has a random initializer for each parameter, and compiling it
    # takes half of the compile time of a run without cached programs.
    return (way or Way(topology)).jit_init(init, options_of_one_call(topology.platform))


def transform_of(network: Model, transform: Transform, topology: Topology) -> Transform:
    """Return a transform as a function of a network's arrays, whose adapters it does not get. Raises: `make_init`."""
    return lambda params, state: _transformed(transform, without_adapters(network, params), state, topology)


def _transformed(transform: Transform, params: Any, model_state: Any, topology: Topology) -> tuple[Any, Any]:
    """Return the result of a transform. Raises: see `make_init`."""
    takes_peers = "peers" in inspect.signature(transform).parameters
    result = transform(params, model_state, **({"peers": topology.peers} if takes_peers else {}))
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"initialize: it returned {kind_of(result)}; return a pair (params, model_state)")
    fresh = {"params": params, "model_state": model_state}
    if difference := first_difference(fresh, dict(zip(fresh, result, strict=True))):
        name, expected, actual = difference
        problem = f"initialize: {name} is {actual}, and the network's is {expected}"
        raise InputError(f"{problem}; keep names, shapes and dtypes")
    return result


def replace_by_weights(params: Any, model_state: Any, weights: Mapping[str, jax.Array]) -> tuple[Any, Any]:
    """Replace arrays by the weights of the same path: "params/…", or the path in the model's state."""

    def replace(tree: Any, prefix: str) -> Any:
        def weight(path: Any, leaf: jax.Array) -> jax.Array:
            return weights.get(prefix + path_of(path), leaf).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(weight, tree)

    return (replace(params, PARAMS), replace(model_state, "")) if weights else (params, model_state)
