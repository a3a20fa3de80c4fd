"""A range test of the learning rate (Smith 2017, arXiv:1506.01186): a few steps at rising rates, and what they say."""

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
from jaxddp.training.run import Keeping

_WORSE = 4
"""So many times its least is a loss that diverges."""
_SMOOTHED, _WINDOW = 1 / 20, 1 / 10
"""Of the test, over which the loss is smoothed, and over which its fall is measured."""


@dataclass(frozen=True)
class RateRange:
    """The rates of a test: from the lowest to the highest, each the same multiple of the one before."""

    lowest: float
    highest: float
    steps: int

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise InputError(f"--lowest {self.lowest:g} and --highest {self.highest:g}: give a lower and a higher rate")

    def schedule(self, step: jax.typing.ArrayLike) -> jax.Array:
        """The rate of a step, 0 for the first."""
        rise = math.log(self.highest / self.lowest) / (self.steps - 1)
        return self.lowest * jnp.exp(rise * step)

    def part(self, share: float) -> int:
        """A share of the steps, at least 1."""
        return max(1, round(share * self.steps))


class Suggestion(NamedTuple):
    """What a test says.

    Attributes:
        rate: None where the loss never fell.
        steepest: where the loss fell fastest; None as well.
        diverged: the rate of the step at which the test ended; None where it came to its highest rate.
    """

    rate: float | None
    steepest: float | None
    diverged: float | None


@dataclass
class RateTest:
    """A listener that keeps the loss of each step and its rate, and knows when to stop."""

    rates: RateRange
    losses: list[float] = field(default_factory=list)
    finite: bool = True

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.metrics["loss"])

    @property
    def smoothed(self) -> np.ndarray:
        """float64[steps]: the exponential mean of the losses, corrected for the nothing that it begins with."""
        means, mean, keep = [], 0.0, 1 - 1 / self.rates.part(_SMOOTHED)
        for step, loss in enumerate(self.losses, 1):
            mean = keep * mean + (1 - keep) * loss
            means.append(mean / (1 - keep**step))
        return np.array(means)

    @property
    def tried(self) -> np.ndarray:
        """float64[steps]: the rates of the losses."""
        return np.asarray(self.rates.schedule(jnp.arange(len(self.losses))), np.float64)

    @property
    def diverged_at(self) -> int | None:
        """The first step, from 0, at which the smoothed loss is more than four times its least so far; None if none is.

        A step that was under way may follow, with a smaller loss again.
        """
        smoothed = self.smoothed
        worse = np.flatnonzero(smoothed > _WORSE * np.minimum.accumulate(smoothed))
        return int(worse[0]) if worse.size else None

    def suggestion(self) -> Suggestion:
        """The rate at which the loss falls fastest, but at most a tenth of that at which it diverges.

        That is the first rate of the window, a tenth of the test, over which the least smoothed loss so far falls
        most: to fall back from a rise counts for nothing.
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
    """Train a setup, whose state is consumed, until its loss diverges. Nothing is written.

    Its config is `of_a_test`, and its optimizer follows the rates. All processes of a job must ask alike; the first
    has the losses. Raises: InputError.
    """
    peers = setup.topology.peers
    peers.agree({"the rates to test": str(rates)})
    test = RateTest(rates)

    def stops(step: int) -> bool:
        # The first process alone has a listener, and all have to stop at one step.
        return peers.from_first("whether the loss diverges", lambda: str(test.diverged_at is not None)) == str(True)

    run = make_run(setup, listeners=[test])
    try:
        checks = dataclasses.replace(run.checks, suspects=lambda state, step: "")
        fit(dataclasses.replace(run, keeping=Keeping(should_stop=stops), checks=checks))
    except NonFiniteError:
        test.finite = False
    except Preempted:
        pass
    return test


def of_a_test(config: Config, rates: RateRange) -> Config:
    """The config for a test of some rates."""
    return config.replace(
        # All of it is of images of one size, and nothing is validated that a schedule or a stop could follow.
        data={"grow_from": None},
        optimizer={"schedule": "constant"},
        # The first loss that is not finite ends it.
        train={"duration": f"{rates.steps} steps", "max_bad_steps": 0, "stop_after": None},
        log={"every": "1 step", "profile": None},
        eval={"every": "0 steps"},
        checkpoint={"every": "0 steps"},
    )
