"""How long steps take, evaluation and saving excluded, and how much of it is waiting for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxddp.core.phases import phase


class Clock:
    """Times the steps between two records, of an epoch, and of all that this process trains; `batch_size` is global.

    `epoch_seconds` is what the running epoch has taken up to the last call of `rates`, from what a resumed one had on.
    """

    def __init__(self, batch_size: int, epoch_seconds: float = 0.0):
        self._batch_size = batch_size
        self.epoch_seconds = epoch_seconds
        self._first_seconds, self._first_steps, self._started = 0.0, 0, False
        self._all_steps, self._all_seconds = 0, 0.0
        self.resume()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """What passes in the block is time spent waiting for data."""
        begin = time.perf_counter()
        with phase("input", None if self._started else "reading the first batch"):
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
        self._begin, self._waited, self._steps = time.perf_counter(), 0.0, 0

    def dispatched(self, steps: int, result: Any) -> None:
        """Count steps dispatched together; the first, which warm up, are waited for, and only then the clock starts."""
        if self._started:
            self._steps += steps
            return
        with phase("device", "taking the first step"):
            jax.block_until_ready(result)
        self._started = True
        self._first_seconds, self._first_steps = time.perf_counter() - self._begin, steps
        self.resume()

    def rates(self) -> tuple[float, float]:
        """(images a second over all devices, share of the time spent waiting for data) since the last call.

        The run's first dispatch has no part in it, unless there was no other; compiling never has.
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
        """Images a second over all devices up to the last call of `rates`; None where the first dispatch was all."""
        return self._all_steps * self._batch_size / self._all_seconds if self._all_steps else None

    def end_epoch(self) -> float:
        """The training seconds of the epoch that ends here; the next begins."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return seconds
