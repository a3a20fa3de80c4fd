"""What is measured of steps between two records: their time, and metric sums, which are added to those of the epoch.

The sums are kept on the devices, and fetched together for a record. A step without a finite gradient is skipped; too
many in a row end the run.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxddp.core.errors import InputError, Key, NonFiniteError, Words, counted
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import phase
from jaxddp.engine.objective import SUBSTITUTED, MetricSums, means_of
from jaxddp.engine.parts.guard import LOSS_SCALE, SKIPPED
from jaxddp.training.run import Run

# The host runs ahead of the devices by at most this many steps, or by one chunk if a chunk has more steps. This limits
# the number of batches on the devices, and a chunk is still dispatched while the devices compute the previous chunk.
_STEPS_IN_FLIGHT = 3
_ADVICE = "Lower the learning rate, or lengthen its warm-up"
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
        place, limit = f"step {step}{self._where}: ", self._limit
        if self._peers.is_first:
            most = f" of at most {limit}" if limit else ""
            reason = "the gradient is not finite" if finite else f"the loss is {means['loss']}"
            _log.warning(f"{place}{reason}, so the step was skipped; {self.in_a_row}{most} in a row")
        if limit is not None and self.in_a_row >= limit:
            begin = f" in a row, from step {step - self.in_a_row + 1}," if self.in_a_row > 1 else ""
            problem = f"{place}{counted(self.in_a_row, 'step')}{begin} had no finite gradient, "
            bound = "as many as " if limit else "and "
            raise TooManySkipped(problem, bound, Key("train.max_bad_steps", limit), f". {_ADVICE}")
        return finite


class EpochSums:
    """The metric sums of an epoch, added up over its steps.

    Steps that were skipped because the loss was not finite are excluded from the means. Their substituted images are
    counted.

    Each of the states that the devices train skips its own steps.

    Args:
        run: its `progress` has the result of `saved` in the checkpoint of a resumed run. A sum that the run no longer
            computes is dropped.

    Attributes:
        step: the last step whose sums were added; after an error of `fetch`, the step of the error.
    """

    def __init__(self, run: Run):
        saved, states, peers = run.progress, run.way.stacked, run.topology.peers
        places = [""] if states == 1 else [f", group {number}" for number in range(states)]
        each = zip(saved.get("skipped_in_a_row", [0] * states), places, strict=True)
        self._skipped = [SkippedSteps(run.plan.max_bad_steps, count, peers, place) for count, place in each]
        self._max_substituted, self._fetch = run.plan.max_substituted, run.way.fetch
        self._pending: list[tuple[range, MetricSums]] = []
        self._sums = {name: np.array(sums) for name, sums in saved.get("epoch_sums", {}).items()}
        self.step = 0

    @property
    def saved(self) -> dict[str, Any]:
        """Plain values: the sums of the current epoch up to the last call of `fetch`, the skipped steps in a row."""
        sums = {name: sums.tolist() for name, sums in self._sums.items()}
        return {"epoch_sums": sums, "skipped_in_a_row": [counter.in_a_row for counter in self._skipped]}

    def add(self, steps: range, sums: MetricSums) -> None:
        """Add the sums of steps that were just dispatched together; wait if too many steps are unfinished.

        Args:
            steps: the numbers of the steps, from 1.
            sums: the metric sums; the sums of several steps are stacked along a first axis.
        """
        self._pending.append((steps, sums))
        before = (each for chunk, each in reversed(self._pending) if steps.stop - chunk.stop >= _STEPS_IN_FLIGHT)
        if (latest := next(before, None)) is not None:
            with phase("device"):
                jax.block_until_ready(latest.values)

    def fetch(self) -> dict[str, float]:
        """Wait for all steps so far, and return the means of the last step.

        Raises:
            NonFiniteError: a step that was not skipped has a loss that is not finite, or too many steps were skipped.
            InputError: too many images were substituted.
        """
        pending, names, self._pending = self._pending, self._pending[-1][1].names, []
        with phase("device"):
            fetched = self._fetch([sums.values for _, sums in pending])
        self._sums = {name: self._sums.get(name, np.zeros(2)) for name in names if name != SKIPPED}
        latest = dict[str, np.ndarray]()
        for (steps, _), array in zip(pending, fetched, strict=True):
            values = array.astype(np.float64).reshape(len(self._skipped), len(steps), *array.shape[-2:])
            for self.step, of_states in zip(steps, np.swapaxes(values, 0, 1), strict=True):
                for counter, all_sums in zip(self._skipped, of_states, strict=True):
                    self._add(counter, dict(zip(names, all_sums[:-1], strict=True)))
                latest = dict(zip(names, of_states.sum(0)[:-1], strict=True))
                # The sums cover all processes, so all processes stop at the same step.
                if SUBSTITUTED in self._sums:
                    check_substituted(round(self._sums[SUBSTITUTED][0]), self._max_substituted, f"step {self.step}")
        means = means_of(latest)
        return {name: means[name] for name in self._sums}

    def _add(self, skipped: SkippedSteps, sums: Mapping[str, np.ndarray]) -> None:
        """Add the sums of a step, or of one group's step, to the epoch's sums. Raises: see `fetch`."""
        means = means_of(sums)
        included = skipped.count_step(self.step, means)
        if included and not math.isfinite(sums["loss"][0]):
            problem = f"step {self.step}: the loss is {means['loss']}; the run stops and its state is not saved"
            raise NonFiniteError(f"{problem}. {_ADVICE}")
        for name in self._sums:
            # A skipped step adds its substituted images, and its finite metrics if it is included. The norm of a
            # gradient that overflowed is not finite.
            if not means.get(SKIPPED) or name == SUBSTITUTED or (included and np.isfinite(sums[name]).all()):
                self._sums[name] = self._sums[name] + sums[name]

    def end_epoch(self) -> dict[str, float]:
        """Return the means of the epoch, NaN if all its steps were skipped, and begin the next epoch."""
        means = means_of(self._sums)
        self._sums = {}
        return means


def check_substituted(count: int, limit: int, where: Words) -> None:
    """Raise `InputError` if more than `limit` images of an epoch were substituted."""
    if count > limit:
        substituted = f": {counted(count, 'image')} of this epoch {'was' if count == 1 else 'were'} substituted, and "
        key = Key("data.max_bad_images")
        advice = "find them with `jaxddp data check`, or raise ", key
        raise InputError(where, substituted, key, f" allows {limit}", advice=advice)


class Clock:
    """A clock of the training time since the last record, in the current epoch, and in this process as a whole.

    Args:
        batch_size: the global batch size.
        epoch_seconds: the training seconds of the current epoch before the run was resumed; 0 for a new epoch.

    Attributes:
        epoch_seconds: the training seconds of the current epoch up to the last call of `rates`.
    """

    def __init__(self, batch_size: int, epoch_seconds: float = 0.0):
        self._batch_size, self.epoch_seconds = batch_size, epoch_seconds
        self._first_seconds, self._first_steps = 0.0, 0
        self._all_steps, self._all_seconds = 0, 0.0
        self.resume()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time in the block as waiting for data."""
        begin = time.perf_counter()
        with phase("input", None if self._first_steps else "reading the first batch"):
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

    def count_dispatch(self, steps: int, result: jax.Array) -> None:
        """Count steps that were dispatched together. The first dispatch is a warm-up and is timed separately."""
        if self._first_steps:
            self._steps += steps
            return
        with phase("device", "taking the first step"):
            jax.block_until_ready(result)
        self._first_seconds, self._first_steps = time.perf_counter() - self._begin, steps
        self.resume()

    def rates(self) -> tuple[float, float]:
        """Return images per second over all devices, and the share of time waiting for data, since the last call.

        The first dispatch of the run is included only if there was no other; compiling is always excluded.
        """
        steps, seconds, waited = self._steps, time.perf_counter() - self._begin, self._waited
        self.epoch_seconds += seconds + self._first_seconds
        if steps:
            self._all_steps, self._all_seconds = self._all_steps + steps, self._all_seconds + seconds
        else:
            steps, seconds = self._first_steps, self._first_seconds
        self._first_seconds = 0.0
        self.resume()
        return steps * self._batch_size / seconds, waited / seconds

    def rate(self) -> float | None:
        """Return images per second over all devices up to the last call of `rates`; None before a second dispatch."""
        return self._all_steps * self._batch_size / self._all_seconds if self._all_steps else None

    def early_rates(self) -> tuple[float, float]:
        """Return the same as `rates` for the steps after the first dispatch, and go on; the devices must be idle."""
        seconds = time.perf_counter() - self._begin
        return self._steps * self._batch_size / seconds, self._waited / seconds

    def end_epoch(self) -> float:
        """Return the training seconds of the epoch that ends, and begin the next epoch."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return seconds
