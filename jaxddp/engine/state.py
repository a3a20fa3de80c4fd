"""What training carries from step to step: arrays only, the same on every device."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxddp.engine.compiler_options import options_of_one_call
from jaxddp.mesh import Topology
from jaxddp.models.adapt import Model


class TrainState(flax.struct.PyTreeNode):
    """The whole of a run between two steps: with the order, a function of `step`, it decides all that follows."""

    step: jax.Array
    """int32[], how many steps were taken."""
    params: Any
    model_state: Any
    """What the model updates itself: batch statistics, for one."""
    opt_state: Any


def create_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, int, int],
    *,
    seed: int,
    topology: Topology,
) -> TrainState:
    """Initialize a replicated state; one compiled program, so that a deep network starts in seconds.

    Args:
        image_shape: (H, W, C) of the images that the network will see.
        seed: every process must give the same.
    """

    def init(key: jax.Array) -> TrainState:
        params, model_state = model.init(key, jnp.zeros((1, *image_shape), jnp.float32))
        return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))

    # Every parameter has random numbers of its own to compile: half of a cold start.
    options = options_of_one_call(topology.platform)
    return jax.jit(init, out_shardings=topology.replicated, compiler_options=options)(jax.random.key(seed))


def abstract_like(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state, without its memory."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """bool[]: no floating-point leaf holds a NaN or an infinity."""
    leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(leaves).all() if leaves else jnp.array(True)
