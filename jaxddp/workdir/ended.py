"""Finds out whether a run has ended. If it has, the same command has nothing left to train."""

import json
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.peers import Peers
from jaxddp.sections.goal import VAL
from jaxddp.training.listeners.jsonl import RESULT
from jaxddp.training.progress.lines import shown

_ENDS = ("done", "stopped")


def how_it_ended(directory: Path, step: int | None, total_steps: int, peers: Peers, *, is_same: bool) -> str:
    """Returns how a run ended, from its result.json; empty unless it ended at its latest checkpoint.

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
        if status not in _ENDS or ended != step:
            return ""
        metrics = {name: value for name, value in validation.items() if isinstance(value, float)}
        measured = f"; result: {VAL} {shown(metrics)}" if metrics else ""
        reason = f" ({result.get('reason')})" if status == "stopped" else ""
        return f"{status} at step {step:,} of {total_steps:,}{reason}: nothing to train{measured}"

    return peers.from_first("whether the run has ended", result_line)
