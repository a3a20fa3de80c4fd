"""Programs of steps: on batches, or on a data set in device memory, from which each step gathers its images.

On images in device memory, one call runs several steps. `CompiledPrograms` keeps the programs of a process.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import P, lax

from jaxddp.core.errors import InputError
from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import scan_range
from jaxddp.engine.objective import MetricSums, Objective, combine_devices
from jaxddp.engine.state import TrainState
from jaxddp.measure.cost import Cost, compile_with_cost
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.interface import Keys
from jaxddp.platforms import platform_named

StepResult = tuple[TrainState, MetricSums]
TrainStep = Callable[..., StepResult]
"""(state, batch, the run's random key) -> (next state, sums of this step). Without a key, the key of seed 0 is used."""
EvalStep = Callable[..., MetricSums]
"""(state, batch) -> the sums over the batch."""
ResidentImages = jax.Array | tuple[jax.Array, jax.Array]
"""All images of a source, [N, H, W, C], replicated. With a second, unlabelled source, a pair of such arrays."""
RESIDENT_FEED = P(), P(AXIS)
"""The shardings of images and of columns."""
Options = Mapping[str, str]
"""The values of options of XLA's compiler, by name."""


_SETTINGS = ["jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"]
_SETTINGS += ["jax_threefry_partitionable", "jax_numpy_dtype_promotion"]


def jax_settings() -> dict[str, str]:
    """Return the settings of JAX that affect results."""
    return {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}


class CompiledPrograms:
    """A cache of compiled programs, keyed by the function that makes a program and by the identity of its arguments.

    The cache keeps the `max_programs` most recently used programs. Each program is compiled on first use.
    """

    def __init__(self, max_programs: int = 32) -> None:
        self._max_programs = max_programs
        self._programs: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, make: Callable[..., Any], *pieces: Any, **options: Any) -> Any:
        """Return `make(*pieces, **options)`, or what it returned for the same objects before."""
        key = make, _identity((jax_settings(), pieces, options))
        # The pieces are kept beside their program, so no other object gets their ids.
        self._programs[key] = entry = self._programs.pop(key, None) or (make(*pieces, **options), (pieces, options))
        if len(self._programs) > self._max_programs:
            del self._programs[next(iter(self._programs))]
        return entry[0]


def _identity(piece: Any) -> Any:
    """Return a key of an object, which is equal for the same objects in a container, and for equal plain values.

    The key of an object with a `program_key` is that of its `program_key`, whose values the object keeps.
    """
    # An attribute of the object itself may be that of another object, which a wrapper of a user holds.
    if hasattr(type(piece), "program_key"):
        return type(piece), _identity(piece.program_key)
    if isinstance(piece, str | int | None):
        return piece
    if isinstance(piece, Mapping):
        return tuple((name, _identity(value)) for name, value in piece.items())
    # Compare identities: two objects of a user may be equal and still compute different values.
    return tuple(map(_identity, piece)) if isinstance(piece, tuple) else id(piece)


def steps_on_residents(one_step: TrainStep, gather: Callable[..., Batch]) -> TrainStep:
    """Return several optimizer steps as one function.

    It takes a state; the images of each source from `place_images`; the placed columns from
    `jaxddp.data.order.stacked_columns`; and the run's key. It runs one step for each batch of the columns. The number
    of batches is static, and a single step has no loop. The function returns the next state and the sums of each step,
    [steps, metrics, 2].

    Args:
        gather: see `gather_batch`.
    """

    def local_steps(state: TrainState, images: ResidentImages, columns: Batch, key: Keys = None) -> StepResult:
        def take_step(state: TrainState, number: jax.Array | int) -> StepResult:
            return one_step(state, gather(images, columns, number), key)

        return scan_range(take_step, state, steps_in(images, columns))

    return local_steps


def make_eval_step(objective: Objective, topology: Topology, *, resident: bool = False) -> EvalStep:
    """Compile (on first use) an evaluation step, or several steps on `resident` images.

    The compiled function takes a replicated state and a placed batch. It returns sums over the unmasked examples of all
    devices. On resident images it takes images and columns, as in `steps_on_residents`, and returns the sums of each
    batch, [batches, metrics, 2].
    """

    def local_step(state: TrainState, batch: Batch) -> MetricSums:
        sums, _ = objective(state.eval_params, state.eval_model_state, batch, train=False)
        return sums.replace(values=lax.psum(sums.values, AXIS), sets=combine_devices(sums.sets))

    def local_batches(state: TrainState, images: jax.Array, columns: Batch) -> MetricSums:
        def measure(carry: None, number: jax.Array | int) -> tuple[None, MetricSums]:
            return carry, local_step(state, gather_batch(images, columns, number))

        return scan_range(measure, None, steps_in(images, columns))[1]

    local, feed = (local_batches, RESIDENT_FEED) if resident else (local_step, (P(AXIS),))
    return jax.jit(jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), *feed), out_specs=P()))


def steps_in(images: ResidentImages, columns: Batch, key: jax.Array | None = None) -> int:
    """Return the number of batches that the columns hold."""
    return columns.row.shape[1]


def gather_batch(images: ResidentImages, columns: Batch, number: jax.Array | int) -> Batch:
    """Return a device's slice of one batch, with its columns and with its images gathered from all images."""
    if isinstance(images, tuple):
        images, unlabelled = images[0], gather_batch(images[1], columns.unlabelled, number)
        return gather_batch(images, columns._replace(unlabelled=None), number)._replace(unlabelled=unlabelled)
    part = jax.tree.map(lambda column: lax.dynamic_index_in_dim(column, number, 1, keepdims=False), columns)
    # Row numbers come from the sample order and are never out of bounds.
    return part._replace(image=images.at[part.row].get(mode="promise_in_bounds"))


def loops_are_slow(objective: Objective, state: TrainState, image_shape: tuple[int, ...], topology: Topology) -> bool:
    """Return whether a step takes longer inside a loop than outside.

    XLA's CPU compiler uses its fast kernels for convolutions only outside loops
    (https://github.com/jax-ml/jax/issues/12868). Inside a loop, the gradient of a convolution takes a hundred times as
    long.
    """
    if not platform_named(topology.platform).uses_cpu_compiler:
        return False
    image = jax.ShapeDtypeStruct((1, *image_shape), objective.preprocess.dtype)

    def predict(state: TrainState, images: jax.Array) -> jax.Array:
        return objective.model.apply(state.params, state.model_state, images, train=False, key=None)[0]

    return "conv_general_dilated" in str(jax.make_jaxpr(predict)(state, image))


def place_images(batches: Iterable[np.ndarray], like: jax.ShapeDtypeStruct, topology: Topology) -> jax.Array:
    """Place all images on every device, replicated.

    No host holds the whole set. Each process reads its slices, and the devices exchange them.

    Args:
        batches: this process's slice of each batch, in order: [b, H, W, C].
        like: the shape [N, H, W, C] and the dtype of all images.
    """

    def write(images: jax.Array, batch: jax.Array, start: jax.Array) -> jax.Array:
        whole = lax.with_sharding_constraint(batch, topology.replicated)
        return lax.dynamic_update_slice_in_dim(images, whole, start, 0)

    images = jax.jit(lambda: jax.numpy.zeros(like.shape, like.dtype), out_shardings=topology.replicated)()
    write = jax.jit(write, donate_argnums=0, out_shardings=topology.replicated)
    start = 0
    for batch in batches:
        placed = topology.place(batch)
        # Wait, so that only one batch is in transfer.
        images = jax.block_until_ready(write(images, placed, topology.replicate(np.int32(start))))
        start += len(placed)
    return images


class Program:
    """A jitted program of one or several steps, compiled on first use for each set of argument shapes.

    Args:
        function: a jitted function of the state and a feed (the arguments after the state).
        steps_in: a function of the feed that returns its number of steps.

    Attributes:
        cost: the cost of one step for the feed of the last call or preparation, which sets it.
    """

    def __init__(self, function: Any, steps_in: Callable[..., int] = lambda *feed: 1):
        self.function, self._steps_in = function, steps_in
        self._compiled: dict[Any, tuple[Any, Cost]] = {}

    def __call__(self, state: TrainState, *feed: Any) -> StepResult:
        compiled = self.prepare(state, *feed)
        # JAX names the operation that makes a NaN only in a call of `jit`'s function.
        debugged = jax.config.jax_debug_nans and self.function  # pyright: ignore[reportAttributeAccessIssue]
        return (debugged or compiled)(state, *feed)

    def check(self, state: TrainState, *feed: Any) -> Any:
        """Trace the program for a feed, and return its jaxpr. Compiling uses the same trace. Raises: see `Way.step`."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            raise InputError("jax_disable_jit is set: a step is always compiled", advice="print with jax.debug.print")
        return self.function.trace(state, *feed).jaxpr

    def prepare(self, state: TrainState, *feed: Any) -> Any:
        """Return the executable for a feed, which is compiled on first use. The feed may consist of shapes."""
        if not self.is_ready(*feed):
            self._compiled[shapes_of(feed)] = self._compile(state, *feed)
        compiled, self.cost = self._compiled[shapes_of(feed)]
        return compiled

    def is_ready(self, *feed: Any) -> bool:
        """Return whether the executable for a feed is compiled."""
        return shapes_of(feed) in self._compiled

    def _compile(self, state: TrainState, *feed: Any) -> tuple[Any, Cost]:
        compiled, cost = compile_with_cost(self.function, state, *feed)
        return compiled, cost.per_step(self._steps_in(*feed))


def shapes_of(feed: Any) -> Any:
    """Return the cache key of a feed: its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(feed)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
