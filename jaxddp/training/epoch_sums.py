"""What is measured of steps between two records: their time, and metric sums, which are added to those of the epoch.

The sums are kept on the devices, and fetched together for a record. A step without a finite gradient is skipped; too
many in a row end the run.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxddp.core.errors import InputError, Key, NonFiniteError, Words
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import phase
from jaxddp.core.wording import counted
from jaxddp.engine.objective import SUBSTITUTED, MetricSums, means_of
from jaxddp.engine.parts.guard import LOSS_SCALE, SKIPPED

# The host runs ahead of the devices by at most this many steps, or by one chunk if a chunk has more steps. This limits
# the number of batches on the devices, and a chunk is still dispatched while the devices compute the previous chunk.
_STEPS_IN_FLIGHT = 3
_VALUES, _NAMES = "epoch_values", "epoch_names"
_log = logging.getLogger("jaxddp.training")


class TooManySkipped(NonFiniteError):
    """The error that too many steps in a row were skipped. They did not change the parameters."""


class SkippedSteps:
    """The number of skipped steps in a row, except steps that a smaller loss scale would have prevented.

    Args:
        limit: the run ends after this many skipped steps in a row; 0 ends it at the first one, None sets no limit.
        in_a_row: the number of skipped steps in a row before the first step, from the checkpoint of a resumed run.
        peers: the processes of the job; the first one logs each skipped step.
        where: the group of devices whose steps are counted, for the messages.
    """

    def __init__(self, limit: int | None = None, in_a_row: int = 0, peers: Peers = ALONE, where: str = ""):
        self._limit, self.in_a_row, self._peers, self._where = limit, in_a_row, peers, where

    def count_step(self, step: int, means: Mapping[str, float]) -> bool:
        """Count a step, and return whether the epoch includes its metrics.

        A skipped step whose loss is not finite is not included.

        Raises: TooManySkipped if `limit` is reached.
        """
        finite = math.isfinite(means["loss"])
        # After an overflow of float16, a lower loss scale may make the next step finite. A scale below 1 does not help.
        can_lower_scale = finite and means.get(LOSS_SCALE, 0.0) >= 1
        if not means.get(SKIPPED) or can_lower_scale:
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        most = f" of at most {self._limit}" if self._limit else ""
        if self._peers.is_first:
            reason = f"the loss is {means['loss']}" if not finite else "the gradient is not finite"
            _log.warning(f"step {step}{self._where}: {reason}, so the step was skipped; {self.in_a_row}{most} in a row")
        if self._limit is not None and self.in_a_row >= self._limit:
            begin = f" in a row, from step {step - self.in_a_row + 1}," if self.in_a_row > 1 else ""
            count = f"{counted(self.in_a_row, 'step')}{begin}"
            bound = "as many as " if self._limit else "and "
            raise TooManySkipped(
                *(
                    f"step {step}{self._where}: {count} had no finite gradient, {bound}",
                    Key("train.max_bad_steps", self._limit),
                ),
                ". Lower the learning rate, or lengthen its warm-up",
            )
        return finite


class EpochSums:
    """The metric sums of an epoch, added up over its steps.

    Steps that were skipped because the loss was not finite are excluded from the means. Their substituted images are
    counted.

    Args:
        saved: the result of `saved` in the checkpoint of a resumed run; empty for a new epoch. A sum that the run no
            longer computes is dropped.
        max_substituted: the largest number of substituted images in an epoch; None sets no limit.
        skipped: count the skipped steps, one for each of the states that the devices train.
        fetch: copies sums to the host. The sums of several states are [states, …].

    Attributes:
        step: the last step whose sums were added; after an error of `fetch`, the step of the error.
    """

    def __init__(
        self,
        saved: Mapping[str, Any] = MappingProxyType({}),
        max_substituted: int | None = None,
        skipped: Sequence[SkippedSteps] | None = None,
        fetch: Callable[[Sequence[jax.Array]], Sequence[np.ndarray]] = jax.device_get,
    ):
        self._max_substituted, self._skipped, self._fetch = max_substituted, skipped or [SkippedSteps()], fetch
        # The last row of the values counts the examples, and has no name.
        self._names: tuple[str, ...] = tuple(saved.get(_NAMES, ()))
        self._pending: list[tuple[range, MetricSums]] = []
        self._values = np.array(saved.get(_VALUES, 0.0))
        self.step = 0

    @property
    def saved(self) -> dict[str, Any]:
        """The sums of the current epoch up to the last call of `fetch`, with their names, as plain values."""
        return {_VALUES: self._values.tolist(), _NAMES: [*self._names]}

    def add(self, steps: range, sums: MetricSums) -> None:
        """Add the sums of steps that were just dispatched together; wait if too many steps are unfinished.

        Args:
            steps: the numbers of the steps, from 1.
            sums: the metric sums; the sums of several steps are stacked along a first axis.
        """
        self._pending.append((steps, sums))
        in_flight = 0
        for chunk, chunk_sums in reversed(self._pending):
            if in_flight >= _STEPS_IN_FLIGHT:
                with phase("device"):
                    jax.block_until_ready(chunk_sums.values)
                break
            in_flight += len(chunk)

    def fetch(self) -> dict[str, float]:
        """Wait for all steps so far, and return the means of the last step.

        Raises:
            NonFiniteError: a step that was not skipped has a loss that is not finite, or too many steps were skipped.
            InputError: too many images were substituted.
        """
        steps = [step for chunk, _ in self._pending for step in chunk]
        with phase("device"):
            fetched = self._fetch([sums.values for _, sums in self._pending])
        values = [
            of_states.astype(np.float64)
            for (chunk, _), array in zip(self._pending, fetched, strict=True)
            for of_states in np.swapaxes(array.reshape(len(self._skipped), len(chunk), *array.shape[-2:]), 0, 1)
        ]
        names, latest = self._pending[-1][1].names, {}
        self._pending.clear()
        self._rename(tuple(name for name in names if name != SKIPPED))
        columns = [column for column, name in enumerate((*names, "examples")) if name != SKIPPED]
        for self.step, of_states in zip(steps, values, strict=True):
            for counter, all_sums in zip(self._skipped, of_states, strict=True):
                self._add(counter, all_sums[columns], means_of(names, all_sums))
            latest = means_of(self._names, of_states[:, columns].sum(0))
            # The sums cover all processes, so all processes stop at the same step.
            if self._max_substituted is not None and SUBSTITUTED in self._names:
                count = round(self._values[self._names.index(SUBSTITUTED), 0])
                check_substituted(count, self._max_substituted, f"step {self.step}")
        return latest

    def _rename(self, names: tuple[str, ...]) -> None:
        """Arrange the sums of the epoch so far by the names of the metrics that the run computes now."""
        if self._names not in ((), names) and self._values.ndim:
            rows = dict(zip((*self._names, "examples"), self._values, strict=True))
            self._values = np.array([rows.get(name, np.zeros(2)) for name in (*names, "examples")])
        self._names = names

    def _add(self, skipped: SkippedSteps, value: np.ndarray, means: Mapping[str, float]) -> None:
        """Add the sums of a step, or of one group's step, to the epoch's sums. Raises: see `fetch`."""
        included = skipped.count_step(self.step, means)
        if included and not math.isfinite(value[0, 0]):
            raise NonFiniteError(
                f"step {self.step}: the loss is {value[0, 0] / value[0, 1]}; the run stops and its state is not saved. "
                "Lower the learning rate, or lengthen its warm-up"
            )
        self._values = self._values + (self._skipped_sums(value, included) if means.get(SKIPPED) else value)

    def _skipped_sums(self, value: np.ndarray, included: bool) -> np.ndarray:
        """Return the sums that a skipped step adds: its substituted images, and its finite metrics if `included`.

        Metrics that are not finite, such as the norm of a gradient that overflowed, are left out.
        """
        finite = np.isfinite(value).all(axis=1, keepdims=True)
        substituted = np.array([[name == SUBSTITUTED] for name in (*self._names, "examples")])
        return np.where(substituted | (included & finite), value, 0)

    def end_epoch(self) -> dict[str, float]:
        """Return the means of the epoch, NaN if all its steps were skipped, and begin the next epoch."""
        nothing = np.zeros((len(self._names) + 1, 2))
        means, self._values = means_of(self._names, nothing + self._values), np.array(0.0)
        return means


def check_substituted(count: int, limit: int, where: Words) -> None:
    """Raise `InputError` if more than `limit` images of an epoch were substituted."""
    if count > limit:
        raise InputError(
            *(where, f": {counted(count, 'image')} of this epoch {'was' if count == 1 else 'were'} substituted, and "),
            Key("data.max_bad_images"),
            f" allows {limit}",
            advice=("find them with `jaxddp data check`, or raise ", Key("data.max_bad_images")),
        )


def counters(limit: int | None, in_a_row: int | Sequence[int], peers: Peers, states: int) -> list[SkippedSteps]:
    """Return a counter for each of the states that the devices train, because each skips its own steps.

    Args:
        in_a_row: the result of the function `in_a_row` in the checkpoint of a resumed run; 0 for a new run.
    """
    counts = [in_a_row] * states if isinstance(in_a_row, int) else in_a_row
    places = [""] if states == 1 else [f", group {number}" for number in range(states)]
    return [SkippedSteps(limit, count, peers, place) for count, place in zip(counts, places, strict=True)]


def in_a_row(skipped: Sequence[SkippedSteps]) -> int | list[int]:
    """Return the skipped steps in a row for a checkpoint: a number, or a list with a number for each group."""
    counts = [counter.in_a_row for counter in skipped]
    return counts[0] if len(counts) == 1 else counts


class Clock:
    """A clock of the training time since the last record, in the current epoch, and in this process as a whole.

    Args:
        batch_size: the global batch size.
        epoch_seconds: the training seconds of the current epoch before the run was resumed; 0 for a new epoch.

    Attributes:
        epoch_seconds: the training seconds of the current epoch up to the last call of `rates`.
    """

    def __init__(self, batch_size: int, epoch_seconds: float = 0.0):
        self._batch_size = batch_size
        self.epoch_seconds = epoch_seconds
        self._first_seconds, self._first_steps, self._started = 0.0, 0, False
        self._all_steps, self._all_seconds = 0, 0.0
        self.resume()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time in the block as waiting for data."""
        begin = time.perf_counter()
        with phase("input", None if self._started else "reading the first batch"):
            yield
        self._waited += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in the block from training time."""
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin

    def resume(self) -> None:
        """Exclude the time since the last call of `rates` from training time."""
        self._begin, self._waited, self._steps = time.perf_counter(), 0.0, 0

    def count_dispatch(self, steps: int, result: Any) -> None:
        """Count steps that were dispatched together. The first dispatch is a warm-up and is timed separately."""
        if self._started:
            self._steps += steps
            return
        with phase("device", "taking the first step"):
            jax.block_until_ready(result)
        self._started = True
        self._first_seconds, self._first_steps = time.perf_counter() - self._begin, steps
        self.resume()

    def rates(self) -> tuple[float, float]:
        """Return images per second over all devices, and the share of time waiting for data, since the last call.

        The first dispatch of the run is included only if there was no other; compiling is always excluded.
        """
        seconds = time.perf_counter() - self._begin
        self.epoch_seconds += seconds + self._first_seconds
        steps, waited = self._steps, self._waited
        self._all_steps, self._all_seconds = self._all_steps + steps, self._all_seconds + (seconds if steps else 0)
        if not steps:
            steps, seconds = self._first_steps, self._first_seconds
        self._first_seconds = 0.0
        self.resume()
        return steps * self._batch_size / seconds, waited / seconds

    def rate(self) -> float | None:
        """Return images per second over all devices up to the last call of `rates`; None before a second dispatch."""
        return self._all_steps * self._batch_size / self._all_seconds if self._all_steps else None

    def end_epoch(self) -> float:
        """Return the training seconds of the epoch that ends, and begin the next epoch."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return seconds
