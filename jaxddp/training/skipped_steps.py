"""Steps that the guard skipped: each is logged, and too many in a row end the run."""

import logging
import math
from collections.abc import Mapping

from jaxddp.core.errors import NonFiniteError
from jaxddp.core.message import Key, Words
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import counted
from jaxddp.engine.parts.guard import SKIPPED
from jaxddp.engine.parts.loss_scale import LOSS_SCALE

_log = logging.getLogger("jaxddp.training")


class TooManySkipped(NonFiniteError):
    """The error that too many steps in a row were skipped. They did not change the parameters; `step` is the last."""

    def __init__(self, *problem: Words, step: int):
        super().__init__(*problem)
        self.step = step


class SkippedSteps:
    """The number of skipped steps in a row, except steps that a smaller loss scale would have prevented.

    Args:
        limit: the run ends after this many skipped steps in a row; 0 ends it at the first one, None sets no limit.
        in_a_row: the number of skipped steps in a row before the first step, from the checkpoint of a resumed run.
        peers: the processes of the job; the first one logs each skipped step.
    """

    def __init__(self, limit: int | None = None, in_a_row: int = 0, peers: Peers = ALONE):
        self._limit, self.in_a_row, self._peers = limit, in_a_row, peers

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
            _log.warning(f"step {step}: {reason}, so the step was skipped; {self.in_a_row}{most} in a row")
        if self._limit is not None and self.in_a_row >= self._limit:
            begin = f" in a row, from step {step - self.in_a_row + 1}," if self.in_a_row > 1 else ""
            count = f"{counted(self.in_a_row, 'step')}{begin}"
            bound = "as many as " if self._limit else "and "
            raise TooManySkipped(
                *(f"step {step}: {count} had no finite gradient, {bound}", Key("train.max_bad_steps", self._limit)),
                ". Lower the learning rate, or lengthen its warm-up",
                step=step,
            )
        return finite
