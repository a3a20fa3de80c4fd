"""A run that is started again after it came to its end, as the same command does, has nothing left to train."""

import json
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.peers import Peers
from jaxddp.sections.goal import VAL
from jaxddp.training.listeners.jsonl import RESULT
from jaxddp.training.progress.lines import shown

_ENDS = ("done", "stopped")


def how_it_ended(directory: Path, step: int | None, total_steps: int, peers: Peers, *, is_same: bool) -> str:
    """What result.json says of a run that ended at a step, whose checkpoint is the latest; empty where it did not.

    Whoever asks for something else, `is_same` not, such as more epochs or another logger, has the run go on. All
    processes must ask together.
    """

    def told() -> str:
        if step is None or not is_same:
            return ""
        try:
            result = json.loads(files.read(directory / RESULT))
            status, ended, validation = result["status"], result["step"], result[VAL] or {}
        # Another run than ours may have left any file there, and a run that begins anew writes its own.
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""
        if status not in _ENDS or ended != step:
            return ""
        known = {name: value for name, value in validation.items() if isinstance(value, float)}
        measured = f"; result: {VAL} {shown(known)}" if known else ""
        reason = f" ({result.get('reason')})" if status == "stopped" else ""
        return f"{status} at step {step:,} of {total_steps:,}{reason}: nothing to train{measured}"

    return peers.from_first("whether the run has ended", told)
