"""A step whose parameters and optimizer state are divided among the devices (ZeRO stages 1 and 2).

Each device gathers the parameters, differentiates its slice of the batch, and gets its slices of the averaged gradients
by a reduce-scatter. This phase runs inside `shard_map`. The update is written for whole arrays, and XLA divides it
among the devices. So an optimizer that needs whole arrays, such as one that computes the norm of a layer's gradient, or
a part that clips by the global norm, gives the same result as without sharding, and XLA adds the communication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import Contribution, Gradients
from jaxddp.engine.objective import MetricSums, TrainObjective
from jaxddp.engine.parts.part import Part
from jaxddp.engine.sharded.sharded_state import shardings
from jaxddp.engine.state import TrainState, all_finite
from jaxddp.engine.step import Phases
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.variables import without_frozen

ShardedStep = Callable[..., tuple[TrainState, MetricSums]]
"""(state, batch, key) -> (next state, sums of this step), for global arrays. Call it inside `jax.jit`."""


def make_sharded_step(
    objective: TrainObjective,
    optimizer: optax.GradientTransformation,
    topology: Topology,
    *,
    schedule: optax.Schedule | None = None,
    parts: Sequence[Part] = (),
    gradients: Gradients,
) -> ShardedStep:
    """Return the optimizer step of all devices on a state with the shardings of `sharded_specs`.

    Args and errors: see `jaxddp.engine.step.make_local_step`.
    """
    shares = gradients.shares(topology)

    def sharded_step(state: TrainState, batch: Batch, key: jax.Array | None = None) -> tuple[TrainState, MetricSums]:
        specs = gradients.specs(state, topology)
        phases = Phases(objective, optimizer, schedule, parts, gradients.of_slices(specs), shares)

        def gradient(state: TrainState, batch: Batch, key: jax.Array | None) -> tuple[Contribution, jax.Array]:
            contribution = phases.gradient(state, batch, key)
            finite = lax.pmin(all_finite(contribution.undivided).astype(jnp.int32), AXIS)
            return contribution._replace(undivided=None), finite

        in_specs = specs.replace(opt_state=()), P(AXIS), P()
        out_specs: Any = Contribution(without_frozen(specs.params, gradients.frozen), P(), P()), P()  # pyright: ignore
        on_devices = jax.shard_map(gradient, mesh=topology.mesh, in_specs=in_specs, out_specs=out_specs)
        contribution, finite = on_devices(state.replace(opt_state=()), batch, key)
        state, sums = phases.update(state, contribution, lambda: finite > 0)
        return lax.with_sharding_constraint(state, shardings(specs, topology)), sums

    return sharded_step
