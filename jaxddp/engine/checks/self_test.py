"""Check before the first step that the averaged gradient equals the gradient that one device computes alone.

A model or a loss can silently break data-parallel training, for example with a custom gradient that omits a sum over
devices, or with a sum in place of a mean. A release of JAX or the network between machines can break it too. The test
takes a few examples of the first batch. It computes their gradient with `Gradients.of_batch` on all devices, as the
step does, and with the same function on a mesh of one device. The network uses running statistics and images are not
augmented, so both gradients must be equal up to rounding.
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
"""The number of examples from each device, and the largest number of devices they are taken from. A single device also
computes the gradient of all these examples."""
MOST_PARAMETERS, MOST_OPERATIONS = 32, 500
"""With at most this many parameter arrays and operations of the traced gradient, the test takes less than a second."""

Mode = Literal["auto", "always", "never"]
_TOLERANCE = {"bfloat16": 0.05, "float16": 0.02, "float32": 0.0001, "float64": 1e-8}
"""The tolerance for each dtype, many times its rounding error; see docs/design.md. The tolerance of the least precise
dtype in the computation or the communication applies."""
_TENSOR_FLOAT = 0.02
"""The tolerance for float32 on a GPU, which multiplies with mantissas as short as float16's."""
_CANCELLED = 0.002
"""Differences of squares in float32 may have a rounding error of this share of the gradient."""
_ADVICE = (Option("parallel.self_test", "never"), " trains without this test")
_log = logging.getLogger("jaxddp.training")


class SelfTest:
    """The self-test of an objective's gradient on the devices of a mesh with two or more devices.

    Programs are compiled when the test first runs, and kept for the next run.

    Args:
        first_batch: a function of a chunk's feed that returns the batch of the first step. JAX traces it.
        mode: "auto" runs the test only if it is expected to take less than a second, most of which is compiling.

    Attributes:
        operations: the number of operations of the traced gradient, by which "auto" decides; None before tracing.
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
        # The test does not use microbatches, because adding them up involves no other device.
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
        """Compare the gradients at a state, for examples of the first batch. All processes must call it together.

        Raises:
            GradientError: on all processes; the message gives the factor between the gradients and its likely cause.
        """
        if self._mode == "never" or (self._mode == "auto" and len(jax.tree.leaves(state.params)) > MOST_PARAMETERS):
            return
        arguments = state.replace(opt_state=(), parts={}), self._few(*feed)
        # Image sizes differ between calls if images grow and a run is resumed.
        shape = arguments[1].image.shape
        if shape not in self._averaged:
            self._averaged[shape] = self._compiled(*arguments)
        averaged = self._averaged[shape]
        if averaged is None:
            self._mode = "never"
            return
        local = jax.tree.map(lambda array: array.addressable_data(0), (averaged(*arguments), *arguments))
        comparison = self._compared(local, in_slices=False)
        if not comparison.agrees(self._tolerance):
            # A network that normalizes by the batch even in evaluation has another gradient in slices.
            in_slices = self._compared(local, in_slices=True)
            comparison = in_slices if in_slices.agrees(self._tolerance) else comparison
        agrees = comparison.agrees(self._tolerance)
        line = "" if agrees else comparison.line(self._topology.num_devices, self._tolerance)
        peers = self._topology.peers
        if line := next(filter(None, peers.exchange("self-test", line)), ""):
            raise GradientError(f"self-test before the first step: {line}", advice=_ADVICE)
        if not comparison.proves and peers.is_first:
            _log.warning(
                f"self-test: the gradient of the first examples is {comparison.norm:g}, so the test proves nothing"
            )

    def _compiled(self, *arguments: Any) -> Any:
        """Compile the averaged gradient. Return None if the program is too large or the model cannot evaluate."""
        try:
            traced = self._gradient().trace(*arguments)
        except Exception:
            # Evaluation would fail in the same way, but a run without validation can still train.
            if self._mode == "always":
                raise
            return None
        operations = list(operations_in(traced.jaxpr))
        # The number is the same on all processes, so all make the same decision.
        self.operations = len(operations)
        if self._mode == "auto" and self.operations > MOST_OPERATIONS:
            return None
        self._tolerance = max(_tolerances(operations, self._topology.platform))
        return traced.lower().compile()

    def _examples(self, batch: Batch) -> Batch:
        """Return the first examples of each device's slice. With more than `MOST_DEVICES` devices, some are masked."""
        devices = self._topology.num_devices
        count = max(EXAMPLES_PER_DEVICE, self._shares // devices)

        def first(column: jax.Array) -> jax.Array:
            of_devices = column.reshape(devices, -1, *column.shape[1:])[:, :count]
            return of_devices.reshape(-1, *column.shape[1:])

        def counted(few: Batch) -> Batch:
            counts = np.isin(np.arange(devices), self._counting).repeat(len(few.mask) // devices)
            others = None if few.unlabelled is None else counted(few.unlabelled)
            # Images are resized in training only.
            return few._replace(mask=jnp.where(counts, few.mask, 0), side=None, unlabelled=others)

        return counted(jax.tree.map(first, batch))

    def _gradient(self) -> Any:
        """Return the averaged gradient as a jitted function of a state and a sharded batch."""
        topology = self._topology

        def local(state: TrainState, few: Batch) -> Any:
            return self._gradients.of_batch(self._objective, state, few, jax.random.key(0), train=False).grads

        sharded = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
        return jax.jit(sharded, compiler_options=self._options)

    def _compared(self, local: tuple[Any, ...], *, in_slices: bool) -> "_Comparison":
        """Compare the averaged gradient with that of one device, computed on all examples at once or in slices."""
        if in_slices not in self._alone:
            self._alone[in_slices] = self._compare_alone(in_slices, jax.tree.leaves(local)[0].device)
        leaves = jax.tree_util.tree_leaves_with_path(local[0])
        names = [path_of(path) for path, _ in leaves]
        return _Comparison(names, np.asarray(self._alone[in_slices](*local), np.float64))

    def _compare_alone(self, in_slices: bool, device: Any) -> Any:
        """Return a jitted function (averaged gradient, state, batch) -> float[leaves, 3] that runs on one device."""
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

        def compare(averaged: Any, *arguments: Any) -> jax.Array:
            single = jax.shard_map(mean_gradient, mesh=alone.mesh, in_specs=P(), out_specs=P())(*arguments)
            pairs = zip(jax.tree.leaves(averaged), jax.tree.leaves(single), strict=True)
            wide = [[leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in pair] for pair in pairs]
            return jnp.stack([jnp.stack([((a - b) ** 2).sum(), (b * b).sum(), (a * b).sum()]) for a, b in wide])

        return jax.jit(compare, compiler_options=self._options)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A comparison of the averaged gradient a with the gradient b of one device."""

    names: list[str]
    """The name of each parameter array."""
    values: np.ndarray
    """float64[arrays, 3]: |a - b|^2, |b|^2 and a . b of each array."""

    @property
    def norm(self) -> float:
        """Return the norm of the gradient of one device."""
        return float(np.sqrt(self.values[:, 1].sum()))

    @property
    def proves(self) -> bool:
        """Tell whether the comparison can reveal a fault: the gradient of one device is neither zero nor infinite."""
        return 0 < self.norm < np.inf

    def agrees(self, tolerance: float) -> bool:
        """Tell whether the gradients differ only by rounding, or cannot be compared."""
        return not np.isfinite(self.norm) or bool(np.sqrt(self.values[:, 0].sum()) <= tolerance * self.norm)

    def line(self, devices: int, tolerance: float) -> str:
        """Describe how the gradients differ, with the likely cause."""
        head = f"the gradient that {devices} devices average is"
        difference, single, product = self.values.sum(axis=0)
        factor = product / single if single else np.inf
        # The part of the difference that the factor does not explain.
        rest = np.sqrt(max(difference - (factor - 1) ** 2 * single, 0)) if single else np.inf
        near = max(tolerance, _CANCELLED)
        if np.isfinite(factor) and rest <= near * abs(factor) * self.norm:
            head = f"{head} {factor:.4g} times that of one device for the same examples"
            if abs(factor / devices - 1) <= near:
                return f"{head}: it is their sum and not their mean. {_SUM}"
            if abs(factor * devices - 1) <= near:
                return f"{head}: it is divided by the number of devices twice. {_SUM}"
            return f"{head}. {_SHARES}"
        index = int(np.argmax(np.nan_to_num(self.values[:, 0], nan=np.inf)))
        deviation = np.sqrt(difference) / self.norm if single else np.inf
        return (
            f"{head} not that of one device for the same examples: the difference is {deviation:.2g} of its norm, "
            f"rounding explains less than {tolerance:g}, and the largest part is in {self.names[index]}. {_SHARES}"
        )


_SUM = "The loss or the model sums over devices where it should not, or this release of jax does"
_SHARES = (
    "A device's share counts twice or not at all, or a custom gradient in the model or the loss omits a sum over the "
    "devices"
)


def _tolerances(operations: list[Any], platform: str) -> Iterator[float]:
    results = (result.aval for operation in operations for result in operation.outvars)
    for dtype in {result.dtype for result in results if hasattr(result, "dtype")}:
        if jnp.issubdtype(dtype, jnp.floating):
            tolerance = _TENSOR_FLOAT if (dtype, platform) == (jnp.float32, "gpu") else _TOLERANCE.get(dtype.name)
            # `_TOLERANCE` does not list dtypes of eight bits or fewer.
            yield 0.3 if tolerance is None else tolerance
