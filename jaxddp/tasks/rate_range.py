"""The learning-rate range test (Smith 2017, arXiv:1506.01186): a few steps at rising rates suggest a rate."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.config import Config
from jaxddp.core.errors import InputError, NonFiniteError, Preempted
from jaxddp.setup.make_run import make_run
from jaxddp.setup.run_setup import RunSetup
from jaxddp.training.events import StepRecord
from jaxddp.training.loop import fit
from jaxddp.training.run import Persistence

_WORSE = 4
"""The loss has diverged if it exceeds this multiple of its minimum so far."""
_SMOOTHED, _WINDOW = 1 / 20, 1 / 10
"""The shares of the test over which the loss is smoothed, and over which its decrease is measured."""


@dataclass(frozen=True)
class RateRange:
    """The rates of a test: a geometric sequence from the lowest to the highest."""

    lowest: float
    highest: float
    steps: int

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise InputError(f"--lowest {self.lowest:g} and --highest {self.highest:g}: give a lower and a higher rate")

    def schedule(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Returns the rate of a step, counted from 0."""
        rise = math.log(self.highest / self.lowest) / (self.steps - 1)
        return self.lowest * jnp.exp(rise * step)

    def part(self, share: float) -> int:
        """Returns the number of steps in a share of the test, at least 1."""
        return max(1, round(share * self.steps))


class Suggestion(NamedTuple):
    """The result of a test.

    Attributes:
        rate: the suggested rate; None if the loss never decreased.
        steepest: the rate at which the loss decreased fastest; None if it never decreased.
        diverged: the rate at which the loss diverged; None if it did not.
    """

    rate: float | None
    steepest: float | None
    diverged: float | None


@dataclass
class RateTest:
    """A listener that collects the losses of a range test and suggests a rate."""

    rates: RateRange
    losses: list[float] = field(default_factory=list)
    finite: bool = True

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.metrics["loss"])

    @property
    def smoothed(self) -> np.ndarray:
        """float64[steps]: the exponential moving average of the losses, with bias correction."""
        means, mean, keep = [], 0.0, 1 - 1 / self.rates.part(_SMOOTHED)
        for step, loss in enumerate(self.losses, 1):
            mean = keep * mean + (1 - keep) * loss
            means.append(mean / (1 - keep**step))
        return np.array(means)

    @property
    def tried(self) -> np.ndarray:
        """float64[steps]: the rates of the steps."""
        return np.asarray(self.rates.schedule(jnp.arange(len(self.losses))), np.float64)

    @property
    def diverged_at(self) -> int | None:
        """The first step, from 0, whose smoothed loss exceeds four times its minimum so far; None if there is none.

        Steps that were already dispatched may follow it, and may have a smaller loss.
        """
        smoothed = self.smoothed
        worse = np.flatnonzero(smoothed > _WORSE * np.minimum.accumulate(smoothed))
        return int(worse[0]) if worse.size else None

    def suggestion(self) -> Suggestion:
        """Returns the rate at which the loss decreases fastest, but at most a tenth of the rate at which it diverges.

        A window of a tenth of the test moves over the running minimum of the smoothed loss. The result is the first
        rate of the window in which this minimum decreases most. A decrease that only undoes an earlier increase of the
        loss does not change the minimum, so it has no effect.
        """
        least, tried, window = np.minimum.accumulate(self.smoothed), self.tried, self.rates.part(_WINDOW)
        diverged = None
        if not self.finite:
            diverged = float(self.rates.schedule(len(self.losses)))
        elif self.diverged_at is not None:
            diverged = float(tried[self.diverged_at])
        falls = least[:-window] - least[window:]
        if not falls.size or falls.max() <= 0:
            return Suggestion(None, None, diverged)
        steepest = float(tried[falls.argmax()])
        return Suggestion(min(steepest, math.inf if diverged is None else diverged / 10), steepest, diverged)


def find_rate(setup: RunSetup, rates: RateRange) -> RateTest:
    """Train a setup until its loss diverges; consumes its state and writes no files.

    The config of the setup must be from `of_a_test`, and its optimizer must use the schedule of `rates`. All processes
    of a job must call it with the same rates; only the result of the first process has the losses.

    Raises: InputError if the rates differ between processes; see also `fit`.
    """
    peers = setup.topology.peers
    peers.agree({"the rates to test": str(rates)})
    test = RateTest(rates)

    def stops(step: int) -> bool:
        # Only the listener of the first process is called, and all must stop at the same step.
        return peers.from_first("whether the loss diverges", lambda: str(test.diverged_at is not None)) == str(True)

    run = make_run(setup, listeners=[test])
    try:
        checks = dataclasses.replace(run.checks, suspects=lambda state, step: "")
        fit(dataclasses.replace(run, persistence=Persistence(should_stop=stops), checks=checks))
    except NonFiniteError:
        test.finite = False
    except Preempted:
        pass
    return test


def of_a_test(config: Config, rates: RateRange) -> Config:
    """Returns the config for a range test."""
    return config.replace(
        # All images have one size. There is no validation, so no schedule and no early stopping that depend on it.
        data={"grow_from": None},
        optimizer={"schedule": "constant"},
        # The first loss that is not finite ends the test.
        train={"duration": f"{rates.steps} steps", "max_bad_steps": 0, "stop_after": None},
        log={"every": "1 step", "profile": None},
        eval={"every": "0 steps"},
        checkpoint={"every": "0 steps"},
    )
