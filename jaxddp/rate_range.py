"""The learning-rate range test (Smith 2017, arXiv:1506.01186): a few steps at rising rates suggest a rate."""

import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.config import Config
from jaxddp.core.errors import InputError, NonFiniteError, Preempted
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.run_training import make_run
from jaxddp.training.events import StepRecord
from jaxddp.training.loop import fit

_DIVERGENCE = 4
"""The loss has diverged if it exceeds this multiple of its minimum so far."""
_SMOOTHING, _WINDOW = 1 / 20, 1 / 10
"""The fractions of the test over which the loss is smoothed, and over which its decrease is measured."""


@dataclasses.dataclass(frozen=True)
class RateRange:
    """The rates of a test: a geometric sequence from the lowest to the highest."""

    lowest: float
    highest: float
    steps: int

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise InputError(f"--lowest {self.lowest:g} and --highest {self.highest:g}: give a lower and a higher rate")

    def schedule(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Return the rate of a step, counted from 0."""
        rise = math.log(self.highest / self.lowest) / (self.steps - 1)
        return self.lowest * jnp.exp(rise * step)

    def num_steps(self, share: float) -> int:
        """Return the number of steps in a share of the test, at least 1."""
        return max(1, round(share * self.steps))


@dataclasses.dataclass
class RateTest:
    """A listener that collects the losses of a range test and suggests a rate."""

    rates: RateRange
    losses: list[float] = dataclasses.field(default_factory=list)
    finite: bool = True

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.metrics["loss"])

    @property
    def smoothed(self) -> np.ndarray:
        """float64[steps]: the exponential moving average of the losses, with bias correction."""
        keep = 1 - 1 / self.rates.num_steps(_SMOOTHING)
        means = itertools.accumulate(self.losses, lambda mean, loss: keep * mean + (1 - keep) * loss, initial=0.0)
        return np.array([*means][1:]) / (1 - keep ** np.arange(1, len(self.losses) + 1))

    @property
    def step_rates(self) -> np.ndarray:
        """float64[steps]: the rates of the steps."""
        return np.asarray(self.rates.schedule(jnp.arange(len(self.losses))), np.float64)

    @property
    def diverged_at(self) -> int | None:
        """The first step, from 0, whose smoothed loss exceeds four times its minimum so far; None if there is none.

        A negative minimum has no such multiple. Later steps, which were already dispatched, may have a smaller loss.
        """
        smoothed, minimum = self.smoothed, np.minimum.accumulate(self.smoothed)
        return next(iter(np.flatnonzero((minimum >= 0) & (smoothed > _DIVERGENCE * minimum)).tolist()), None)

    def suggestion(self) -> tuple[float | None, float | None, float | None]:
        """Return the rate at which the loss decreases fastest, but at most a tenth of the rate at which it diverges.

        The other two values are these rates. A rate is None if the loss never decreases, or does not diverge.

        A window of a tenth of the test moves over the running minimum of the smoothed loss. The result is the first
        rate of the window in which this minimum decreases most. A decrease that only undoes an earlier increase of the
        loss does not change the minimum, so it has no effect.
        """
        window, minimum = self.rates.num_steps(_WINDOW), np.minimum.accumulate(self.smoothed)
        step = self.diverged_at if self.finite else len(self.losses)
        diverged = None if step is None else float(self.rates.schedule(step))
        decreases = minimum[:-window] - minimum[window:]
        if not decreases.size or decreases.max() <= 0:
            return None, None, diverged
        steepest = float(self.step_rates[decreases.argmax()])
        return min(steepest, math.inf if diverged is None else diverged / 10), steepest, diverged


def find_rate(setup: RunSetup, rates: RateRange) -> RateTest:
    """Train a setup until its loss diverges; consumes its state and writes no files.

    The config of the setup must be a result of `config_of_test`. All processes of a job must call this function with
    the same rates; only the result of process 0 has the losses.

    Raises: InputError if the rates differ between processes, or the optimizer does not use them; see also `fit`.
    """
    peers = setup.topology.peers
    peers.agree({"the rates to test": str(rates)})
    test = RateTest(rates)

    def stops(step: int) -> bool:
        # Only the first process calls the listener, and all processes must stop at the same step.
        return peers.from_first("whether the loss diverges", lambda: test.diverged_at is not None)

    run = make_run(setup, listeners=[test])
    if run.learning_rate is None:
        raise InputError("get_optimizer does not use its argument learning_rate, which the test raises; pass it on")
    with contextlib.suppress(Preempted):
        try:
            fit(dataclasses.replace(run, should_stop=stops, suspects=lambda state, step: ""))
        except NonFiniteError:
            test.finite = False
    return test


def config_of_test(config: Config, rates: RateRange) -> Config:
    """Return the config for a range test."""
    # A period of Lookahead that is longer than the test has no effect.
    lookahead = config.train.lookahead if rates.steps >= (config.train.lookahead or 0) else None
    return config.replace(
        # All images have one size. Validation is disabled, so the schedule and early stopping must not depend on it.
        data={"grow_from": None},
        optimizer={"schedule": "constant"},
        # The first loss that is not finite ends the test.
        train={"duration": f"{rates.steps} steps", "max_bad_steps": 0, "stop_after": None, "lookahead": lookahead},
        log={"every": "1 step", "profile": None},
        eval={"every": "0 steps"},
        checkpoint={"every": "0 steps"},
    )
