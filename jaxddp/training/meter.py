"""Figures of steps that the devices may still be computing: kept as arrays, fetched together when they are wanted."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxddp.engine.objective import SUBSTITUTED, MetricSums
from jaxddp.errors import InputError, NonFiniteError

# The host goes on while this many steps that it dispatched last are unfinished, or the one chunk that holds more; so
# batches in flight stay few, and a chunk is dispatched while the devices compute the one before it.
_STEPS_IN_FLIGHT = 3


class Meter:
    """Adds up the sums of an epoch, and times the steps between two records, evaluation and saving excluded.

    Args:
        progress: what `progress()` returned at the step that the run resumes, so that an epoch goes on where it stood.
        max_substituted: how many images of an epoch others may stand in for.
    """

    def __init__(self, batch_size: int, progress: dict[str, Any] | None = None, max_substituted: int | None = None):
        progress = progress or {}
        self._batch_size, self._max_substituted = batch_size, max_substituted
        self._names: tuple[str, ...] = ()
        self._pending: list[tuple[range, MetricSums]] = []
        self._epoch_values = np.array(progress.get("epoch_values", 0.0))
        self._epoch_seconds = float(progress.get("epoch_seconds", 0.0))
        self._first_seconds = 0.0
        self._first_steps = 0
        self._all_steps, self._all_seconds = 0, 0.0
        self._restart()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What passes in the block is no training time."""
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin

    def resume(self) -> None:
        """What passed since the last call of `rates` was no training time."""
        self._restart()

    def add(self, steps: range, sums: MetricSums) -> None:
        """Take the sums of steps that were just dispatched together.

        Args:
            steps: their numbers, from 1.
            sums: of one step; or of several, `values[k]` those of `steps[k]`, and what follows these is left out.
        """
        if not self._names:
            # The first dispatch waits for its compilation: the second starts the clock.
            self._names = sums.names
            jax.block_until_ready(sums.values)
            self._first_seconds, self._first_steps = time.perf_counter() - self._begin, len(steps)
            self._restart()
        else:
            self._steps += len(steps)
        self._pending.append((steps, sums))
        in_flight = 0
        for dispatched, its_sums in reversed(self._pending):
            if in_flight >= _STEPS_IN_FLIGHT:
                jax.block_until_ready(its_sums.values)
                break
            in_flight += len(dispatched)

    def fetch(self) -> dict[str, float]:
        """Wait for every step so far, and return the means of the last one.

        Raises:
            NonFiniteError: a loss was NaN or infinite; names the first step where it was.
            InputError: others stood in for more of the epoch's images than may be; names the step.
        """
        steps = [step for several, _ in self._pending for step in several]
        fetched = jax.device_get([sums.values for _, sums in self._pending])
        values = [
            value.astype(np.float64)
            for (several, _), found in zip(self._pending, fetched, strict=True)
            for value in found.reshape(-1, *found.shape[-2:])[: len(several)]
        ]
        self._pending.clear()
        for step, value in zip(steps, values, strict=True):
            if not math.isfinite(value[0, 0]):
                raise NonFiniteError(
                    f"step {step}: the loss is {value[0, 0] / value[0, 1]}; the run stops and its state is not saved. "
                    "Lower the learning rate, or lengthen its warm-up"
                )
            self._epoch_values = self._epoch_values + value
            self._check_substituted(step)
        return self._means(values[-1])

    def rates(self) -> tuple[float, float]:
        """(images a second over all devices, share of the time spent waiting for data) since the last call.

        The run's first dispatch, which compiles, has no part in it, unless there was no other.
        """
        seconds = time.perf_counter() - self._begin
        self._epoch_seconds += seconds + self._first_seconds
        steps, waited = self._steps, self._waited
        self._all_steps, self._all_seconds = self._all_steps + steps, self._all_seconds + (seconds if steps else 0)
        if not steps:
            steps, seconds = self._first_steps, self._first_seconds
        self._first_seconds = 0.0
        self._restart()
        return steps * self._batch_size / seconds, waited / seconds

    def rate(self) -> float | None:
        """Images a second over all devices up to the last call of `rates`; None where the first dispatch was all."""
        return self._all_steps * self._batch_size / self._all_seconds if self._all_steps else None

    def end_epoch(self) -> tuple[dict[str, float], float]:
        """The means and the training seconds of the epoch that ends here; the next begins."""
        means, seconds = self._means(self._epoch_values), self._epoch_seconds
        self._epoch_values, self._epoch_seconds = np.array(0.0), 0.0
        return means, seconds

    def progress(self) -> dict[str, Any]:
        """The running epoch, as plain values."""
        return {"epoch_values": self._epoch_values.tolist(), "epoch_seconds": self._epoch_seconds}

    def _check_substituted(self, step: int) -> None:
        # The sums are of all processes, so all of them stop at one step, however many they are.
        if self._max_substituted is not None and SUBSTITUTED in self._names:
            count = round(self._epoch_values[self._names.index(SUBSTITUTED), 0])
            check_substituted(count, self._max_substituted, f"step {step}")

    def _means(self, values: np.ndarray) -> dict[str, float]:
        return {name: float(total / count) for name, (total, count) in zip(self._names, values, strict=True)}

    def _restart(self) -> None:
        self._begin, self._waited, self._steps = time.perf_counter(), 0.0, 0


def check_substituted(count: int, limit: int, where: str) -> None:
    """Raises `InputError` where others stand in for more images of an epoch than may be."""
    if count > limit:
        raise InputError(
            f"{where}: others stand in for {count} images of this epoch, and data.max_bad_images allows {limit}; find "
            "them with `jaxddp data check`, or raise data.max_bad_images"
        )
