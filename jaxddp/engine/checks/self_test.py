"""Before the first step: whether the gradient that the devices average is the one that a device computes by itself.

A model or a loss can break data-parallel training without a word: a gradient by hand that leaves out a sum over the
devices, a sum where a mean belongs. So can a release of JAX, and a network between machines. Here a few examples of the
first batch go through the step's own path, `Gradients.of_batch` over all devices, and through the same function on a
mesh of one device, which has nothing to average. Running statistics and no augmentation are used, so that N devices
and one must agree up to rounding.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import GradientError
from jaxddp.core.message import Option
from jaxddp.data.batch import Batch
from jaxddp.engine.compiler_options import options_in_haste
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.state import TrainState
from jaxddp.engine.step_objective import TrainObjective
from jaxddp.measure.flops import operations_in
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.variables import path_of

EXAMPLES_PER_DEVICE, MOST_DEVICES = 2, 8
"""So many examples, of so many devices at most: one device computes all of them."""
MOST_PARAMETERS, MOST_OPERATIONS = 32, 500
"""Up to so many arrays of parameters, and operations of the traced gradient, the test takes less than a second."""

Mode = Literal["auto", "always", "never"]
_TOLERANCE = {"bfloat16": 0.05, "float16": 0.02, "float32": 0.0001, "float64": 1e-8}
"""By the coarsest dtype in which anything is computed or sent: many times its rounding, see BUILD_NOTES.md."""
_TENSOR_FLOAT = 0.02
"""For float32 on a GPU, which multiplies mantissas as long as those of float16."""
_CANCELLED = 0.002
"""Up to so much of a gradient, what remains of a difference of squares in float32 may be rounding."""
_AGAIN = (Option("parallel.self_test", "never"), " trains all the same")
_log = logging.getLogger("jaxddp.training")


class SelfTest:
    """Of an objective and the way to its gradient on the devices of a mesh, of which there are two or more.

    Programs are compiled where the test is made, and kept for the next.

    Args:
        first_batch: what a chunk of steps is fed with -> the batch of its first step, traced by JAX.
        mode: "auto" tests where that is expected to take less than a second, which is mostly compiling.

    Attributes:
        operations: of the traced gradient, by which "auto" decides; None where it was not traced.
    """

    def __init__(
        self,
        objective: TrainObjective,
        gradients: Gradients,
        topology: Topology,
        first_batch: Callable[..., Batch],
        mode: Mode = "auto",
    ):
        self._objective = objective
        # Microbatches add up on one device.
        self._gradients = dataclasses.replace(gradients, accumulate=1)
        self._topology, self._mode = topology, mode
        self._shares = self._gradients.shares(topology)
        self._counting = range(0, topology.num_devices, -(-topology.num_devices // MOST_DEVICES))
        self._options = options_in_haste(topology.platform)
        self._few = jax.jit(
            lambda *feed: self._examples(first_batch(*feed)),
            out_shardings=topology.replicated,
            compiler_options=self._options,
        )
        self._averaged: dict[tuple[int, ...], Any] = {}
        self.operations: int | None = None
        self._tolerance = 0.0
        self._alone: dict[bool, Any] = {}

    def __call__(self, state: TrainState, *feed: Any) -> None:
        """Compare the gradients at a state, of examples of the first batch. All processes must call it alike.

        Raises:
            GradientError: on all processes alike; by what factor they differ, and what that means.
        """
        if self._mode == "never" or (self._mode == "auto" and len(jax.tree.leaves(state.params)) > MOST_PARAMETERS):
            return
        given = state.replace(opt_state=(), parts={}), self._few(*feed)
        # Of another size, where images grow and the run is resumed.
        shape = given[1].image.shape
        if shape not in self._averaged:
            self._averaged[shape] = self._compiled(*given)
        averaged = self._averaged[shape]
        if averaged is None:
            self._mode = "never"
            return
        here = jax.tree.map(lambda array: array.addressable_data(0), (averaged(*given), *given))
        found = self._compared(here, in_slices=False)
        if not found.agrees(self._tolerance):
            # What normalizes by the batch even in evaluation, and by a device's own slice, has another gradient then.
            in_slices = self._compared(here, in_slices=True)
            found = in_slices if in_slices.agrees(self._tolerance) else found
        line = "" if found.agrees(self._tolerance) else found.line(self._topology.num_devices, self._tolerance)
        peers = self._topology.peers
        if line := next(filter(None, peers.exchange("self-test", line)), ""):
            raise GradientError(f"self-test before the first step: {line}", advice=_AGAIN)
        if not found.proves and peers.is_first:
            _log.warning(f"self-test: the gradient of the first examples is {found.norm:g}, which proves nothing")

    def _compiled(self, *given: Any) -> Any:
        """The averaged gradient; None where it is too large a program, or the model cannot evaluate."""
        try:
            traced = self._gradient().trace(*given)
        except Exception:
            # Evaluation would fail as well, of which a run need not have any.
            if self._mode == "always":
                raise
            return None
        operations = list(operations_in(traced.jaxpr))
        # The same on all processes, so that all decide alike.
        self.operations = len(operations)
        if self._mode == "auto" and self.operations > MOST_OPERATIONS:
            return None
        self._tolerance = max(_tolerances(operations, self._topology.platform))
        return traced.lower().compile()

    def _examples(self, batch: Batch) -> Batch:
        """The first few of each device's slice; of devices beyond `MOST_DEVICES` they are masked."""
        devices = self._topology.num_devices
        count = max(EXAMPLES_PER_DEVICE, self._shares // devices)

        def first(column: jax.Array) -> jax.Array:
            of_devices = column.reshape(devices, -1, *column.shape[1:])[:, :count]
            return of_devices.reshape(-1, *column.shape[1:])

        def counted(few: Batch) -> Batch:
            counts = np.isin(np.arange(devices), self._counting).repeat(len(few.mask) // devices)
            others = None if few.unlabelled is None else counted(few.unlabelled)
            # Images are resized in training, and this is none.
            return few._replace(mask=jnp.where(counts, few.mask, 0), side=None, unlabelled=others)

        return counted(jax.tree.map(first, batch))

    def _gradient(self) -> Any:
        """A jitted function of a state and a sharded batch."""
        topology = self._topology

        def local(state: TrainState, few: Batch) -> Any:
            return self._gradients.of_batch(self._objective, state, few, jax.random.key(0), train=False).grads

        sharded = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
        return jax.jit(sharded, compiler_options=self._options)

    def _compared(self, here: tuple[Any, ...], *, in_slices: bool) -> "_Found":
        """What the averaged gradient is beside that of one device, of all examples at once or `in_slices`."""
        if in_slices not in self._alone:
            self._alone[in_slices] = self._beside(in_slices, jax.tree.leaves(here)[0].device)
        leaves = jax.tree_util.tree_leaves_with_path(here[0])
        names = [path_of(path) for path, _ in leaves]
        return _Found(names, np.asarray(self._alone[in_slices](*here), np.float64))

    def _beside(self, in_slices: bool, device: Any) -> Any:
        """A jitted function of the averaged gradient and what it is of, on one device: float[leaves, 3]."""
        alone, lone = Topology.create([device]), Gradients(frozen=self._gradients.frozen)
        device_of = np.arange(self._shares) * self._topology.num_devices // self._shares
        counting = np.flatnonzero(np.isin(device_of, self._counting))

        def mean_gradient(state: TrainState, few: Batch) -> Any:
            slices = jax.tree.map(lambda column: column.reshape(self._shares, -1, *column.shape[1:]), few)
            slices = jax.tree.map(lambda column: column[counting], slices)
            whole = jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:]), slices)

            def of(batch: Batch) -> tuple[Any, jax.Array]:
                share = lone.of_batch(self._objective, state, batch, jax.random.key(0), train=False)
                return share.grads, share.sums.values[0, 1]

            if not in_slices:
                return of(whole)[0]
            grads, weights = jax.lax.map(of, slices)
            shares = weights / weights.sum()
            return jax.tree.map(lambda grad: jnp.tensordot(shares.astype(grad.dtype), grad, 1), grads)

        def compare(averaged: Any, *given: Any) -> jax.Array:
            own = jax.shard_map(mean_gradient, mesh=alone.mesh, in_specs=P(), out_specs=P())(*given)
            pairs = zip(jax.tree.leaves(averaged), jax.tree.leaves(own), strict=True)
            wide = [[leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in pair] for pair in pairs]
            return jnp.stack([jnp.stack([((a - b) ** 2).sum(), (b * b).sum(), (a * b).sum()]) for a, b in wide])

        return jax.jit(compare, compiler_options=self._options)


@dataclasses.dataclass(frozen=True)
class _Found:
    """An averaged gradient a beside that of one device b: of each array, by name, |a - b|^2, |b|^2 and a . b."""

    names: list[str]
    values: np.ndarray

    @property
    def norm(self) -> float:
        """Of the gradient of one device."""
        return float(np.sqrt(self.values[:, 1].sum()))

    @property
    def proves(self) -> bool:
        """Whether the gradient of one device is one that a fault can show in."""
        return 0 < self.norm < np.inf

    def agrees(self, tolerance: float) -> bool:
        """Whether they differ by rounding alone, or nothing can be told."""
        return not np.isfinite(self.norm) or bool(np.sqrt(self.values[:, 0].sum()) <= tolerance * self.norm)

    def line(self, devices: int, tolerance: float) -> str:
        """How they differ, and what that means."""
        head = f"the gradient that {devices} devices average is"
        difference, own, product = self.values.sum(axis=0)
        factor = product / own if own else np.inf
        # What is left of the difference once the factor is taken away.
        rest = np.sqrt(max(difference - (factor - 1) ** 2 * own, 0)) if own else np.inf
        near = max(tolerance, _CANCELLED)
        if np.isfinite(factor) and rest <= near * abs(factor) * self.norm:
            head = f"{head} {factor:.4g} times that of one device for the same examples"
            if abs(factor / devices - 1) <= near:
                return f"{head}: it is their sum and not their mean. {_SUM}"
            if abs(factor * devices - 1) <= near:
                return f"{head}: it is divided by the number of devices twice. {_SUM}"
            return f"{head}. {_SHARES}"
        place = int(np.argmax(np.nan_to_num(self.values[:, 0], nan=np.inf)))
        deviation = np.sqrt(difference) / self.norm if own else np.inf
        return (
            f"{head} not that of one device for the same examples: it is off by {deviation:.2g} of its norm, where "
            f"rounding makes less than {tolerance:g}, and most in {self.names[place]}. {_SHARES}"
        )


_SUM = "A loss, a model or a part of it adds up over the devices where nothing should, or this release of jax does"
_SHARES = (
    "A device's share counts twice or not at all, or a gradient by hand in the model or the loss leaves out a sum over "
    "the devices"
)


def _tolerances(operations: list[Any], platform: str) -> Iterator[float]:
    for dtype in {result.aval.dtype for each in operations for result in each.outvars if hasattr(result.aval, "dtype")}:
        if jnp.issubdtype(dtype, jnp.floating):
            own = _TENSOR_FLOAT if (dtype, platform) == (jnp.float32, "gpu") else _TOLERANCE.get(dtype.name)
            # A dtype of eight bits or fewer.
            yield 0.3 if own is None else own
