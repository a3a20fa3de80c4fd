"""The sharding of a state whose parameters and optimizer state are divided among the devices between two steps.

An array is divided along its first axis whose size is a multiple of the number of devices. An array without such an
axis is whole on every device, and so are vectors, such as biases and the scales of norms: they are less than 1% of the
parameters, and dividing them needs more kernels. The global shapes do not change, so a checkpoint fits any number of
devices.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxddp.engine.state import TrainState
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.variables import path_of
from jaxddp.sections.layers import NO_LAYERS, Layers


def sharded_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """Return the axis along which an array is divided among the devices; None if no axis can be divided."""
    if devices == 1 or len(shape) < 2:
        return None
    return next((axis for axis, size in enumerate(shape) if size and size % devices == 0), None)


def axis_of(spec: P) -> int | None:
    """Return the axis that a spec of `sharded_specs` divides; None for an array that is whole."""
    return len(spec) - 1 if spec else None


def sharded_specs(state: TrainState, devices: int, frozen: Layers = NO_LAYERS) -> Any:
    """Return the `PartitionSpec` of each array of a state, as a tree like the state.

    The step's number and the model's state are whole on every device, and so are frozen parameters: they have no
    optimizer state, and every step reads all of them.

    Args:
        state: the state, or its shapes.
    """

    def spec(leaf: Any) -> P:
        axis = sharded_axis(leaf.shape, devices)
        return P() if axis is None else P(*[None] * axis, AXIS)

    def parameter_spec(path: Any, leaf: Any) -> P:
        return P() if frozen and path_of(path) in frozen else spec(leaf)

    return state.replace(
        step=P(),
        params=jax.tree_util.tree_map_with_path(parameter_spec, state.params),
        model_state=jax.tree.map(lambda leaf: P(), state.model_state),
        opt_state=jax.tree.map(spec, state.opt_state),
        parts=jax.tree.map(spec, state.parts),
    )


def shardings(specs: Any, topology: Topology) -> Any:
    """Return the sharding of each array of a state, from its spec."""
    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(topology.mesh, spec), specs, is_leaf=is_spec)


def make_gather(topology: Topology) -> Callable[[TrainState], TrainState]:
    """Compile (on first use) a function that makes the parameters and the parts' arrays whole on every device.

    The optimizer's state stays divided, to save memory. An evaluation does not read it.
    """
    copy = jax.jit(lambda arrays: arrays, out_shardings=topology.replicated)

    def gather(state: TrainState) -> TrainState:
        params, parts = copy((state.params, state.parts))
        return state.replace(params=params, parts=parts)

    return gather
