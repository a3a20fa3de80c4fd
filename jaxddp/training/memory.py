"""The memory of a run's devices: looked at before the first step, and named where it runs out later."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError
from jaxddp.measure.memory import Fit, Needs, Report, agreed_fit, ran_out
from jaxddp.training.run import Run

_LONGEST_REASON = 200


class Memory:
    """Around the steps of a run it makes one line, an `InputError`, of an allocation that fails."""

    def __init__(self, run: Run):
        self._run = run
        self._fit: Fit | None = None
        self._step = 0

    def check(self, step: int, state: TrainState, feed: tuple[Any, ...]) -> None:
        """See that the compiled program fits the devices of all processes, before it first runs; `step` ends it.

        All processes must call it alike. Raises: InputError; the same on all of them.
        """
        if self._fit is None:
            cost, topology = self._run.program.cost, self._run.topology
            needs = None if cost is None else Needs.of(cost, state.params)
            self._fit = agreed_fit(self._run.division, Report.of(needs, topology, (state, feed)))
            self._fit.check()
        self._step = step

    def __enter__(self) -> "Memory":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or not ran_out(error):
            return
        # The devices compute behind the host: what failed may be an earlier step.
        when = f"by step {self._step}" if self._step else "before the first step"
        fit = self._fit or Fit(self._run.division)
        raise InputError(f"memory ran out {when} ({_reason(error)}): {fit}; {fit.advice()}") from error

    @contextmanager
    def of_validation(self, step: int) -> Iterator[None]:
        """Around a validation, after a step: its batch is another one."""
        try:
            yield
        except Exception as error:
            if not ran_out(error):
                raise
            where = f"in the validation after step {step} ({_reason(error)})"
            fit = "" if self._fit is None else f"{self._fit}; "
            raise InputError(f"memory ran out {where}: {fit}lower eval.batch_size") from error


def _reason(error: BaseException) -> str:
    """XLA's own words; on a GPU many lines follow the first."""
    return str(error).splitlines()[0].partition(": ")[2][:_LONGEST_REASON].rstrip(".")
