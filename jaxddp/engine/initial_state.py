"""The state at step 0: fresh parameters, or given ones, and what optimizer and parts make of them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.core.errors import InputError
from jaxddp.core.wording import kind_of
from jaxddp.engine.compiler_options import options_of_one_call
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_PARAMS, TrainState, first_difference
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.models.variables import PARAMS, path_of

Transform = Callable[..., tuple[Any, Any]]
"""(params, model_state) -> (params, model_state) of the same names, shapes and dtypes. One that also has an argument
`peers` is given the job's `jaxddp.core.peers.Peers`."""


def create_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, int, int],
    *,
    seed: int,
    topology: Topology,
    parts: Sequence[Part] = (),
    transform: Transform | None = None,
) -> TrainState:
    """Initialize a replicated state; every process must give the same seed. See `make_init`."""
    return make_init(model, optimizer, image_shape, topology, parts=parts, transform=transform)(jax.random.key(seed))


def make_init(
    model: Model,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, int, int],
    topology: Topology,
    *,
    parts: Sequence[Part] = (),
    transform: Transform | None = None,
) -> Callable[..., TrainState]:
    """Compile (on first use) the initialization of a replicated state from the key of a seed, and from weights.

    The result takes the key and, by path, arrays of "params/…" and of the model's state in place of the fresh ones.

    It is one program, so that a deep network starts in seconds.

    Args:
        image_shape: (H, W, C) of the images that the network will see.
        transform: of the fresh parameters, before weights replace them and before optimizer and parts see them: an
            initialization from data. Traced by JAX; it must give every process the same, and keep names, shapes and
            dtypes.

    Raises:
        InputError: when it is first used; `transform` changes one, and the first is named; or two parts keep
            parameters for evaluation.
    """
    takes_peers = transform is not None and _takes_peers(transform)

    def init(key: jax.Array, weights: Mapping[str, jax.Array] | None = None) -> TrainState:
        params, model_state = model.init(key, jnp.zeros((1, *image_shape), jnp.float32))
        if transform is not None:
            fresh = {"params": params, "model_state": model_state}
            made = transform(params, model_state, **({"peers": topology.peers} if takes_peers else {}))
            if not isinstance(made, tuple) or len(made) != 2:
                raise InputError(f"initialize: it returned {kind_of(made)}; return a pair (params, model_state)")
            params, model_state = made
            if differs := first_difference(fresh, {"params": params, "model_state": model_state}):
                name, wanted, found = differs
                raise InputError(
                    f"initialize: {name} is {found}, and the network's is {wanted}; keep names, shapes and dtypes"
                )
        params, model_state = with_weights(params, model_state, weights or {})
        arrays_of = {part.name: part.init(params, model_state) for part in parts}
        own = {name: arrays for name, arrays in arrays_of.items() if arrays is not None}
        if len(keepers := [name for name, arrays in own.items() if EVAL_PARAMS in arrays]) > 1:
            raise InputError(
                f"the parts {keepers[0]!r} and {keepers[1]!r} both keep parameters for evaluation; leave one out"
            )
        return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), own)

    # Every parameter has random numbers of its own to compile: half of a cold start.
    options = options_of_one_call(topology.platform)
    return jax.jit(init, out_shardings=topology.replicated, compiler_options=options)


def _takes_peers(transform: Transform) -> bool:
    try:
        return "peers" in inspect.signature(transform).parameters
    except (TypeError, ValueError):
        return False  # Some built-in ones show none.


def with_weights(params: Any, model_state: Any, weights: Mapping[str, jax.Array]) -> tuple[Any, Any]:
    """The same with these arrays, given by path: "params/…", or the path of a model's state."""

    def given(tree: Any, begin: str) -> Any:
        def of(path: Any, leaf: jax.Array) -> jax.Array:
            return weights.get(begin + path_of(path), leaf).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(of, tree)

    return (given(params, PARAMS), given(model_state, "")) if weights else (params, model_state)
