"""The two phases of a training step: compute the gradient of the global batch, and update the state with it.

When a step is traced, `shard_map`'s replication checker verifies that the results are the same on every device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import Contribution, Gradients
from jaxddp.engine.objective import MetricSums, TrainObjective
from jaxddp.engine.optimizer import call_update, scale_updates
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState, check_same, check_types
from jaxddp.models.interface import Keys, cast_like, with_frozen, without_frozen

_DROPOUT = 0x64726F


@dataclass(frozen=True)
class Phases:
    """The phases of a training step, and the objects that they use.

    Attributes:
        schedule: a function from the step's number, which starts at 0, to a factor of the updates. It is for optimizers
            without a schedule.
        parts: optional parts of the step, called in this order; their arrays are in the state.
        gradients: the computation of the batch's gradient on the devices. The run's `jaxddp.engine.ways.way.Way` sets
            it and `shares`.
        shares: the number of slices of the global batch whose sums are averaged.
    """

    objective: TrainObjective
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None = None
    parts: Sequence[Part] = ()
    gradients: Gradients = field(default_factory=Gradients)
    shares: int = 1

    @property
    def program_key(self) -> tuple[Any, ...]:
        """The objects on which a program depends; the way of the program sets the other fields."""
        return self.objective, self.optimizer, self.schedule, self.parts

    def gradient(self, state: TrainState, batch: Batch, key: Keys, device: jax.Array | None = None) -> Contribution:
        """Return the gradient of the global batch from a device's slice of it. Call it inside `jax.shard_map`.

        Args:
            device: the number of the device; see `Gradients.of_batch`.
        """
        # The key is an argument and not a constant, so that runs with different seeds share one program.
        run_key = jax.random.key(0) if key is None else key
        dropout = jax.random.fold_in(jax.random.fold_in(run_key, _DROPOUT), state.step)
        words = {"train": True, "image_key": run_key, "scale": self._loss_scale(state), "device": device}
        return self.gradients.of_batch(self.objective, state, batch, dropout, **words)

    def combine(self, state: TrainState, contribution: Contribution) -> Contribution:
        """Return the gradient of the global batch from the sums of the devices; see `Gradients.combine`."""
        return self.gradients.combine(state, contribution, self._loss_scale(state))

    def _loss_scale(self, state: TrainState) -> jax.Array | float:
        return math.prod(part.loss_scale(state.parts.get(part.name)) for part in self.parts)

    def update(
        self, state: TrainState, contribution: Contribution, is_finite: Callable[[], jax.Array]
    ) -> tuple[TrainState, MetricSums]:
        """Return the next state, and the sums of the step over the global batch.

        Args:
            is_finite: returns whether the gradients are finite, bool[].

        Raises: InputError if the optimizer, the model or a part changes the names, shapes or dtypes of the state.
        """
        parts, averaged, means = self.parts, contribution.grads, contribution.sums
        # A part without arrays in the state has the value None.
        arrays = {part.name: state.parts.get(part.name) for part in parts}
        grads = averaged
        for part in parts:
            changed = part.gradients(arrays[part.name], grads)
            grads = check_same("gradients", grads, changed, f"the part {part.name!r}")
        params = self.gradients.averaging.parameters(state.params)
        trained = without_frozen(params, self.gradients.frozen)
        updates, opt_state = call_update(
            self.optimizer, grads, state.opt_state, trained, value=means.mean_loss(), grad=averaged
        )
        rates = [] if self.schedule is None else [self.schedule(state.step)]
        rates += [rate for part in parts if (rate := part.rate_factor(arrays[part.name])) is not None]
        if rates:
            rate = functools.reduce(jax.numpy.multiply, rates)
            updates, opt_state = scale_updates(updates, state.opt_state, opt_state, lambda path: rate)
        params = with_frozen(optax.apply_updates(trained, updates), params)
        model_state = cast_like(state.model_state, contribution.model_state)
        updated_state = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        new = check_types(state, updated_state)
        sums = means.replace(values=means.values * self.shares)
        for part in parts:
            next_arrays, new = part.update(arrays[part.name], state, new, grads)
            if part.judges:
                next_arrays, new = part.judge(next_arrays, state, new, is_finite())
            if part.name in state.parts:
                new = new.replace(parts={**new.parts, part.name: next_arrays})
            new = check_types(state, new, f"the part {part.name!r}")
            sums = sums.with_scalars(part.report(next_arrays, averaged))
        return new, sums
