"""Calls the listeners of a run in order. Of the loggers, only metrics.jsonl ends the run if it fails."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxddp.config import Config
from jaxddp.config.registry import LOGGERS
from jaxddp.core.errors import THEN, JaxddpError, Preempted
from jaxddp.core.peers import Peers
from jaxddp.core.phases import phase
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd, RunStart, StepRecord, StopTraining
from jaxddp.training.listeners.jsonl import JsonLines

_log = logging.getLogger("jaxddp.training")


def make_loggers(config: Config, workdir: Path) -> list[Listener]:
    """Return the loggers of `log.to`; they write nothing before the run starts.

    Raises: InputError if a name is unknown, or the library of a logger is not installed.
    """
    loggers = {name: LOGGERS.get(name)(config, workdir) for name in config.log.to}
    # A resumed run needs metrics.jsonl, so a failure to write it ends the run.
    return [each if isinstance(each, JsonLines) else OptionalLogger(name, each) for name, each in loggers.items()]


class Notifier:
    """The listeners of a run, and the calls of their methods. Listeners whose `start` did not return are skipped.

    Only the first process calls its listeners: otherwise every process would print and write the same lines.
    """

    def __init__(self, listeners: Sequence[Any], peers: Peers):
        self._listeners, self._started = listeners if peers.is_first else (), list[Any]()
        self._peers, self._stop = peers, ""

    def start(self, record: RunStart) -> None:
        with phase("listeners", "opening logs"):
            for listener in self._listeners:
                _call(listener, "start", record)
                self._started.append(listener)

    def notify(self, method: str, record: Any) -> None:
        """Call a method of each listener with a record."""
        with phase("listeners"):
            for listener in self._started:
                try:
                    _call(listener, method, record)
                except StopTraining as stop:
                    self._stop = str(stop) or f"{type(listener).__name__} ended the training"

    def reason_to_stop(self) -> str:
        """Return the reason of a listener that raised `StopTraining`, or "". All processes must call it together."""
        return self._peers.from_first("a listener's stop", lambda: self._stop)

    def end(self, record: RunEnd) -> None:
        """Call `end` of each listener. All processes must call this method, and wait for the first."""
        self.notify("end", record)
        self._wait_for_first()

    def fail(self, record: RunEnd, error: BaseException) -> None:
        """Call `end` of each listener. Add a note about each failure to the error that ended the run.

        After `Preempted`, which all processes raise, all wait for the first.
        """
        with phase("listeners"):
            for listener in self._started:
                try:
                    _call(listener, "end", record)
                except KeyboardInterrupt:
                    raise
                except BaseException as another:
                    error.add_note(f"{THEN} {type(listener).__name__}.end failed: {another}")
        if isinstance(error, Preempted):
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        # A tracker may need longer than `parallel.shutdown_timeout`, for which an ended process waits for the others.
        self._peers.from_first("finished logs", str)


class OptionalLogger(Listener):
    """A logger whose failure does not end the run: a warning is logged, and the logger is not used again."""

    def __init__(self, name: str, logger: Any):
        self.name, self._logger, self._failed_logger = name, logger, None
        self.wants_predictions = getattr(logger, "wants_predictions", 0)
        self.wants_metrics = getattr(logger, "wants_metrics", ())

    def start(self, run: RunStart) -> None:
        self._try("start", run, run.start_step)

    def step(self, record: StepRecord) -> None:
        self._try("step", record, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._try("evaluation", record, record.step)

    def end(self, run: RunEnd) -> None:
        failed_logger = self._failed_logger
        self._try("end", run, run.step)
        # Without `end`, a tracking service would show the run as still running. A second failure is not logged.
        with suppress(Exception):
            _call(failed_logger, "end", run)

    def _try(self, method: str, record: Any, step: int) -> None:
        try:
            _call(self._logger, method, record)
        except StopTraining:
            raise
        # Some libraries end the process if they find no server.
        except (Exception, SystemExit) as error:
            self._failed_logger, self._logger = self._logger, None
            error_type = "" if isinstance(error, JaxddpError) else f"{type(error).__name__}: "
            reason = " ".join(f"{error_type}{error}".split())[:300]
            _log.warning(f"the logger {self.name} failed at step {step} ({reason}) and is left out from here on")


def _call(listener: Any, method: str, record: Any) -> None:
    """Call a method of a listener, if it has one."""
    getattr(listener, method, lambda record: None)(record)
