"""Check before the first step that the averaged gradient equals that of one device.

A model or a loss can make the averaged gradient wrong without an error, for example by a custom gradient that omits a
sum over devices, or by a sum in place of a mean. A fault in a release of JAX or in the network between machines has the
same effect. The test takes a few examples of the first batch. It computes their gradient with `Gradients.of_batch` on
all devices, as the step does, and again on a mesh of one device. The network uses running statistics and images are not
augmented, so the two gradients must be equal up to rounding.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from jaxddp.core.errors import GradientError, Option
from jaxddp.data.batch import Batch
from jaxddp.engine.compilation import unoptimized_options
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.objective import TrainObjective
from jaxddp.engine.state import TrainState
from jaxddp.engine.ways.way import Way
from jaxddp.kernels import path_of
from jaxddp.measure.cost import operations_in
from jaxddp.mesh import Topology
from jaxddp.models.interface import as_wide
from jaxddp.platforms import platform_named

EXAMPLES_PER_DEVICE, MOST_DEVICES = 2, 8
"""The number of examples of each device, and the largest number of devices whose examples are used. The numbers are
small, because a single device also computes the gradient of all these examples."""
MOST_PARAMETERS, MOST_OPERATIONS = 32, 500
"""With at most these numbers of parameter arrays and traced operations, the test takes less than a second."""

Mode = Literal["auto", "always", "never"]
_TOLERANCE = {"bfloat16": 0.05, "float16": 0.02, "float32": 0.0001, "float64": 1e-8}
"""The relative tolerance for each dtype, many times its rounding error; see docs/design.md. The test uses the tolerance
of the least precise dtype in the computation or the communication."""
_CANCELLED = 0.002
"""A difference of squares in float32 may have a rounding error of this fraction of the gradient's norm."""
_ADVICE = (Option("parallel.self_test", "never"), " trains without this test")
_log = logging.getLogger("jaxddp.training")


class SelfTest:
    """The self-test of an objective's gradient on the two or more devices of a way.

    Programs are compiled when the test first runs, and reused by later runs of the test.

    Args:
        first_batch: a traceable function that returns the batch of the first step from the arguments of the step's
            program.
        mode: "auto" runs the test only if compiling and running it is expected to take less than a second.

    Attributes:
        operations: the number of operations of the traced gradient, None before tracing. The mode "auto" compares it
            with `MOST_OPERATIONS`.
    """

    def __init__(self, objective: TrainObjective, way: Way, first_batch: Callable[..., Batch], mode: Mode = "auto"):
        self._objective = objective
        # The test needs no microbatches, because each device adds its own.
        self._way = replace(way, gradients=replace(way.gradients, accumulate=1))
        self._topology, self._shares, self._mode = way.topology, way.shares, mode
        devices = way.topology.num_devices
        self._unmasked_devices = range(0, devices, -(-devices // MOST_DEVICES))
        self._jit = functools.partial(jax.jit, compiler_options=unoptimized_options(way.topology.platform))
        replicated = way.topology.replicated
        self._first_examples = self._jit(lambda *feed: self._examples(first_batch(*feed)), out_shardings=replicated)
        self._gradient = self._jit(self._way.gradient(objective), out_shardings=replicated)
        self.operations: int | None = None
        self._tolerance = 0.0
        self._compare = functools.cache(self._make_comparison)

    def __call__(self, state: TrainState, *feed: Any) -> None:
        """Compare the two gradients at a state, for examples of the first batch. All processes must call it together.

        Raises:
            GradientError: on all processes, if the gradients differ. The message states the difference and its likely
                cause.
        """
        if self._mode == "never" or (self._mode == "auto" and len(jax.tree.leaves(state.params)) > MOST_PARAMETERS):
            return
        arguments = state.replace(opt_state=(), parts={}), self._first_examples(*feed)
        if not self._is_small(*arguments):
            self._mode = "never"
            return
        local = jax.tree.map(lambda array: array.addressable_data(0), (self._gradient(*arguments), *arguments))
        comparison, peers, message = self._compare(False)(local), self._topology.peers, ""
        # If a network normalizes by the batch in evaluation, too, or an objective compares the images of its batch, the
        # gradient depends on the slices. So one device computes each slice separately.
        depends = not comparison.agrees(self._tolerance)
        if depends and not self._compare(True)(local).agrees(self._tolerance):
            message = comparison.describe(self._topology.num_devices, self._tolerance)
        if message := next(filter(None, peers.exchange("self-test", message)), ""):
            raise GradientError(f"self-test before the first step: {message}", advice=_ADVICE)
        if peers.is_first and depends:
            reason = "the network, or a term of the objective that is no sum over examples, depends on the slice"
            _log.warning(f"self-test: the gradient changes with the number of devices: {reason}")
        if peers.is_first and not 0 < comparison.norm < np.inf:
            norm = f"the gradient of the first examples is {comparison.norm:g}"
            _log.warning(f"self-test: {norm}, so the test proves nothing")

    def _is_small(self, *arguments: Any) -> bool:
        """Trace the averaged gradient. Return False if it is too large or the model fails in evaluation."""
        try:
            traced = self._gradient.trace(*arguments)
        except Exception:
            # A validation would fail, too, but a run without validation can train.
            if self._mode == "always":
                raise
            return False
        operations = list(operations_in(traced.jaxpr))
        # The number is the same on all processes, so all processes make the same decision.
        self.operations = len(operations)
        if self._mode == "auto" and self.operations > MOST_OPERATIONS:
            return False
        self._tolerance = max(_tolerances(operations, self._topology.platform))
        return True

    def _examples(self, batch: Batch) -> Batch:
        """Return the first examples of each device's slice. At most `MOST_DEVICES` devices have unmasked examples."""
        devices = self._topology.num_devices
        count = max(EXAMPLES_PER_DEVICE, self._shares // devices)

        def first(column: jax.Array) -> jax.Array:
            return column.reshape(devices, -1, *column.shape[1:])[:, :count].reshape(-1, *column.shape[1:])

        def mask_devices(few: Batch) -> Batch:
            is_unmasked = np.isin(np.arange(devices), self._unmasked_devices).repeat(len(few.mask) // devices)
            unlabelled = None if few.unlabelled is None else mask_devices(few.unlabelled)
            # Only training resizes images.
            return few._replace(mask=jnp.where(is_unmasked, few.mask, 0), side=None, unlabelled=unlabelled)

        return mask_devices(jax.tree.map(first, batch))

    def _make_comparison(self, in_slices: bool) -> Callable[[tuple[Any, ...]], "_Comparison"]:
        """Return a function that compares the averaged gradient with that of one device, at once or in slices.

        It takes (averaged gradient, state, batch) on one device.
        """
        single_device = Topology.create(self._topology.mesh.local_devices[:1])
        gradients = Gradients(frozen=self._way.gradients.frozen)
        device_of = np.arange(self._shares) * self._topology.num_devices // self._shares
        unmasked_shares = np.flatnonzero(np.isin(device_of, self._unmasked_devices))

        def mean_gradient(state: TrainState, few: Batch) -> Any:
            slices = jax.tree.map(lambda column: column.reshape(self._shares, -1, *column.shape[1:]), few)
            slices = jax.tree.map(lambda column: column[unmasked_shares], slices)
            whole = jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:]), slices)

            def gradient_of(batch: Batch) -> tuple[Any, jax.Array]:
                share = gradients.of_batch(self._objective, state, batch, jax.random.key(0), train=False)
                return share.grads, share.sums.values[0, 1]

            if not in_slices:
                return gradient_of(whole)[0]
            grads, weights = jax.lax.map(gradient_of, slices)
            shares = weights / weights.sum()
            return jax.tree.map(lambda grad: jnp.tensordot(shares.astype(grad.dtype), grad, 1), grads)

        def compare(averaged: Any, *arguments: Any) -> jax.Array:
            single = jax.shard_map(mean_gradient, mesh=single_device.mesh, in_specs=P(), out_specs=P())(*arguments)
            pairs = zip(jax.tree.leaves(averaged), jax.tree.leaves(single), strict=True)
            wide = [map(as_wide, pair) for pair in pairs]
            return jnp.array([[x.sum() for x in (abs(a - b) ** 2, abs(b) ** 2, (a * b.conj()).real)] for a, b in wide])

        compared = self._jit(compare)

        def comparison(local: tuple[Any, ...]) -> _Comparison:
            names = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(local[0])]
            return _Comparison(names, np.asarray(compared(*local), np.float64))

        return comparison


@dataclass(frozen=True)
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

    def agrees(self, tolerance: float) -> bool:
        """Return whether the gradients are equal up to rounding, or the gradient of one device is not finite."""
        return not np.isfinite(self.norm) or bool(np.sqrt(self.values[:, 0].sum()) <= tolerance * self.norm)

    def describe(self, devices: int, tolerance: float) -> str:
        """Return a description of the difference between the gradients, with the likely cause."""
        head = f"the gradient that {devices} devices average is"
        difference, single, product = self.values.sum(axis=0)
        factor = product / single if single else np.inf
        # The norm of the difference that remains after scaling by the factor.
        rest = np.sqrt(max(difference - (factor - 1) ** 2 * single, 0)) if single else np.inf
        bound = max(tolerance, _CANCELLED)
        if np.isfinite(factor) and rest <= bound * abs(factor) * self.norm:
            head = f"{head} {factor:.4g} times that of one device for the same examples"
            if abs(factor / devices - 1) <= bound:
                return f"{head}: it is their sum and not their mean. {_SUM}"
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
            precision = platform_named(platform).float32_products if dtype == jnp.float32 else dtype.name
            # Dtypes of eight bits or fewer are not listed.
            yield _TOLERANCE.get(precision, 0.3)
