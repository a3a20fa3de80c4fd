"""The time that steps take without evaluation and saving, and the share of it spent waiting for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxddp.core.phases import phase


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
