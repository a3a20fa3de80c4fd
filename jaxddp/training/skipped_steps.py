"""Steps that the guard skipped: each is logged, and too many in a row end the run."""

import logging
import math
from collections.abc import Mapping, Sequence

from jaxddp.core.errors import Key, NonFiniteError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import counted
from jaxddp.engine.parts.guard import LOSS_SCALE, SKIPPED

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


def counters(limit: int | None, in_a_row: int | Sequence[int], peers: Peers, groups: int) -> list[SkippedSteps]:
    """Return a counter for each group of devices, because each group skips its own steps.

    Args:
        in_a_row: the result of the function `in_a_row` in the checkpoint of a resumed run; 0 for a new run.
    """
    counts = [in_a_row] * groups if isinstance(in_a_row, int) else in_a_row
    places = [""] if groups == 1 else [f", group {group}" for group in range(groups)]
    return [SkippedSteps(limit, count, peers, place) for count, place in zip(counts, places, strict=True)]


def in_a_row(skipped: Sequence[SkippedSteps]) -> int | list[int]:
    """Return the skipped steps in a row for a checkpoint: a number, or a list with a number for each group."""
    counts = [counter.in_a_row for counter in skipped]
    return counts[0] if len(counts) == 1 else counts
