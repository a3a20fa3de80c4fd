"""Describes the end of a run. The same command has nothing left to train after a run has ended."""

import json
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.peers import Peers
from jaxddp.sections.goal import VAL
from jaxddp.training.listeners.jsonl import RESULT
from jaxddp.training.progress.lines import format_metrics

_END_STATUSES = ("done", "stopped")


def describe_end(directory: Path, step: int | None, total_steps: int, peers: Peers, *, is_same: bool) -> str:
    """Return a line about the end of a run, from its result.json; empty if it did not end at its latest checkpoint.

    All processes must call it together.

    Args:
        step: the step of the latest checkpoint; None if there is none.
        is_same: whether config.json is unchanged. Otherwise the run continues, for instance with more epochs.
    """

    def result_line() -> str:
        if step is None or not is_same:
            return ""
        try:
            result = json.loads(files.read(directory / RESULT))
            status, ended, validation = result["status"], result["step"], result[VAL] or {}
        # Another program may have written the file. A new run replaces it.
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""
        if status not in _END_STATUSES or ended != step:
            return ""
        metrics = {name: value for name, value in validation.items() if isinstance(value, float)}
        measured = f"; result: {VAL} {format_metrics(metrics)}" if metrics else ""
        reason = f" ({result.get('reason')})" if status == "stopped" else ""
        return f"{status} at step {step:,} of {total_steps:,}{reason}: nothing to train{measured}"

    return peers.from_first("whether the run has ended", result_line)
