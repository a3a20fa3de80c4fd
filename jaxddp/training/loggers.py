"""The loggers that a config names. But for metrics.jsonl, no run ends because one of them fails."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxddp.config import Config
from jaxddp.core.errors import JaxddpError
from jaxddp.registry import LOGGERS
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd, RunStart, StepRecord
from jaxddp.training.listeners.jsonl import JsonLines

_LONGEST_REASON = 300
_log = logging.getLogger("jaxddp.training")


def make_loggers(config: Config, workdir: Path) -> list[Listener]:
    """The loggers of `log.to`, which write nothing before the run starts.

    Raises:
        InputError: a name that is unknown, a logger whose library is not installed, or as `LogConfig.check`.
    """
    config.log.check()
    loggers = {name: LOGGERS.get(name)(config, workdir) for name in config.log.to}
    # A run resumes by metrics.jsonl.
    return [each if isinstance(each, JsonLines) else Dispensable(name, each) for name, each in loggers.items()]


class Dispensable(Listener):
    """A logger without which the run goes on: its first failure is said in one line, and then it hears of its end."""

    def __init__(self, name: str, logger: Any):
        self.name, self._logger = name, logger
        self._step, self._failed = 0, None
        self.wants_predictions = getattr(logger, "wants_predictions", 0)
        self.wants_metrics = getattr(logger, "wants_metrics", ())

    def start(self, run: RunStart) -> None:
        self._step = run.start_step
        self._tell("start", run)

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        self._tell("step", record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._tell("evaluation", record)

    def end(self, run: RunEnd) -> None:
        failed = self._failed
        self._tell("end", run)
        # What it keeps elsewhere would seem to go on; that it fails once more is no news.
        with suppress(Exception):
            getattr(failed, "end", _ignore)(run)

    def _tell(self, moment: str, record: Any) -> None:
        try:
            getattr(self._logger, moment, _ignore)(record)
        # Some libraries end the process where they find no server.
        except (Exception, SystemExit) as error:
            self._failed, self._logger = self._logger, None
            kind = "" if isinstance(error, JaxddpError) else f"{type(error).__name__}: "
            reason = " ".join(f"{kind}{error}".split())[:_LONGEST_REASON]
            _log.warning(f"the logger {self.name} failed at step {self._step} ({reason}) and is left out from here on")


def _ignore(record: Any) -> None:
    """For a logger that is left out, and for the moments that one has no method for."""
