"""A training set that lies on the devices: several steps in one dispatch, each of which gathers its images there."""

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.data.batch import Batch
from jaxddp.engine.objective import MetricSums, Objective
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import TrainStep
from jaxddp.mesh import AXIS, Topology


def make_resident_steps(
    local_step: TrainStep, topology: Topology, *, length: int, compiler_options: Mapping[str, str] | None = None
) -> Callable[..., tuple[TrainState, MetricSums]]:
    """Compile (on first use) up to `length` optimizer steps, of `make_local_step`, as one program.

    The result takes a replicated state, which it consumes; the images of `place_images`; the columns of
    `jaxddp.data.source.stacked_columns`, placed; and the number of steps, a replicated int32[] of 1 to `length`. It
    returns the next state and the sums of each step, [length, metrics, 2], 0 beyond that number. The number is an
    argument and not a shape, so that one program takes chunks of any length: where a run is cut into chunks can then
    have no part in its numbers. Of one step there is no loop in the program.
    """

    def local_steps(
        state: TrainState, images: jax.Array, columns: Batch, count: jax.Array
    ) -> tuple[TrainState, MetricSums]:
        def batch(number: jax.Array | int) -> Batch:
            own = jax.tree.map(lambda column: lax.dynamic_index_in_dim(column, number, 1, keepdims=False), columns)
            # Rows come from the order and are never out of bounds.
            return own._replace(image=images.at[own.row].get(mode="promise_in_bounds"))

        def take_step(number: jax.Array, carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
            state, values = carry
            state, sums = local_step(state, batch(number))
            return state, values.at[number].set(sums.values)

        if length == 1:
            state, sums = local_step(state, batch(0))
            return state, sums.replace(values=sums.values[None])
        _, sums = jax.eval_shape(local_step, state, batch(0))
        values = jnp.zeros((length, *sums.values.shape), sums.values.dtype)
        state, values = lax.fori_loop(0, count, take_step, (state, values))
        return state, sums.replace(values=values)

    specs = (P(), P(), P(AXIS), P())
    steps = jax.shard_map(local_steps, mesh=topology.mesh, in_specs=specs, out_specs=P())
    return jax.jit(steps, donate_argnums=0, compiler_options=dict(compiler_options or {}))


def loops_are_slow(objective: Objective, state: TrainState, image_shape: tuple[int, ...], topology: Topology) -> bool:
    """Whether a step takes longer inside of a loop than by itself.

    XLA's CPU compiler brings convolutions into the form that its fast kernels want only outside of loops
    (https://github.com/jax-ml/jax/issues/12868); inside, the gradient of a convolution takes a hundred times as long.
    """
    if topology.platform != "cpu":
        return False
    image = jax.ShapeDtypeStruct((1, *image_shape), objective.preprocess.dtype)

    def predict(state: TrainState, images: jax.Array) -> jax.Array:
        return objective.model.apply(state.params, state.model_state, images, train=False, key=None)[0]

    return "conv_general_dilated" in str(jax.make_jaxpr(predict)(state, image))


def place_images(
    batches: Iterable[np.ndarray], num_rows: int, image_shape: tuple[int, ...], topology: Topology
) -> jax.Array:
    """All images on every device: uint8[num_rows, H, W, C], replicated.

    Each process brings its slice of each batch in order, uint8[b, H, W, C], and sends it to the others through the
    devices: no host holds the set.
    """

    def empty() -> jax.Array:
        return jnp.zeros((num_rows, *image_shape), jnp.uint8)

    def write(images: jax.Array, batch: jax.Array, start: jax.Array) -> jax.Array:
        whole = lax.with_sharding_constraint(batch, topology.replicated)
        return lax.dynamic_update_slice_in_dim(images, whole, start, 0)

    images = jax.jit(empty, out_shardings=topology.replicated)()
    write = jax.jit(write, donate_argnums=0, out_shardings=topology.replicated)
    start = 0
    for batch in batches:
        placed = topology.place(batch)
        # Waiting keeps the batches that are on their way to the device to one.
        images = jax.block_until_ready(write(images, placed, topology.replicate(np.int32(start))))
        start += len(placed)
    return images
