"""The listeners of a run, told of its moments in their order."""

from collections.abc import Sequence
from typing import Any

from jaxddp.core.errors import THEN
from jaxddp.core.own_code import is_ctrl_c
from jaxddp.core.phases import phase
from jaxddp.training.events import RunEnd, RunStart


class Audience:
    """Listeners, of which only those that started hear of the rest; see `jaxddp.training.events.Listener`."""

    def __init__(self, listeners: Sequence[Any]):
        self._listeners, self._started = listeners, list[Any]()

    def start(self, record: RunStart) -> None:
        with phase("listeners", "opening logs"):
            for listener in self._listeners:
                getattr(listener, "start", _ignore)(record)
                self._started.append(listener)

    def tell(self, moment: str, record: Any) -> None:
        with phase("listeners"):
            for listener in self._started:
                getattr(listener, moment, _ignore)(record)

    def fail(self, record: RunEnd, error: BaseException) -> None:
        """Tell all of the end; one that fails at it must not hide the reason of it."""
        with phase("listeners"):
            for listener in self._started:
                try:
                    getattr(listener, "end", _ignore)(record)
                except BaseException as another:
                    if is_ctrl_c(another):
                        raise
                    error.add_note(f"{THEN} {type(listener).__name__}.end failed: {another}")


def _ignore(record: Any) -> None:
    """For the moments that a listener has no method for."""
