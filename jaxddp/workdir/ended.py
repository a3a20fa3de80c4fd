"""A run that has ended: what it reached, and whether the same command has nothing left to train.

The module reads only files of the work directory, and imports neither JAX nor TensorFlow.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.core.wording import figure
from jaxddp.recipe_file import RecipeFile
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.sections.goal import VAL
from jaxddp.training.checkpoints.integrity import (
    CHECKPOINTS,
    LENGTH_KEYS,
    LOCATION_KEYS,
    MAY_CHANGE,
    Integrity,
    steps_in,
)
from jaxddp.training.checkpoints.validation_file import ValidationFile
from jaxddp.training.listeners.jsonl import RESULT
from jaxddp.training.progress import format_metrics
from jaxddp.workdir.claim import Claim, Comparison, compare
from jaxddp.workdir.lock import is_locked
from jaxddp.workdir.paths import with_absolute_paths

_END_STATUSES = ("done", "stopped")
_OPENING_KEYS = frozenset(
    (*LENGTH_KEYS, *LOCATION_KEYS, "data.verify", "data.manifest", "data.data_dir", "objective.teacher")
)
"""The keys that a resumed run may change, and after whose change it opens its data: to train longer, or to compare."""


@dataclass(frozen=True)
class Result:
    """The end of a run, from its result.json.

    Attributes:
        status: "done", or "stopped" by early stopping.
        validation: the metrics of the last validation.
        moment: the local time at which the file was written.
    """

    status: str
    step: int
    reason: str
    validation: Mapping[str, float]
    moment: datetime

    @classmethod
    def read(cls, directory: Path) -> "Result | None":
        """Return the end of the run in a work directory; None if the run has not ended."""
        path = directory / RESULT
        try:
            result: dict[str, Any] = files.parse_json(files.read(path))
            moment = datetime.fromtimestamp(path.stat().st_mtime)
            status, step, validation = result["status"], result["step"], result[VAL] or {}
            metrics = {name: value for name, value in validation.items() if isinstance(value, float)}
        # Another program may have written the file. A new run replaces it.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        if status not in _END_STATUSES or type(step) is not int:
            return None
        return cls(status, step, f"{result.get('reason') or ''}", metrics, moment)


def describe_end(directory: Path, step: int | None, peers: Peers, *, is_same: bool) -> str:
    """Return lines about the end of a run, or "" if it did not end at its latest checkpoint.

    All processes must call it together; process 0 decides.

    Args:
        step: the step of the latest checkpoint; None if there is none.
        is_same: whether the run has the same length. Otherwise it continues, for instance with more epochs.
    """

    def lines() -> str:
        result = Result.read(directory) if is_same else None
        return "" if result is None or result.step != step else _lines(directory, result)

    # All processes have the same step, and most starts have none: they need no exchange.
    if step is None:
        return ""
    return peers.from_first("whether the run has ended", lines)


def nothing_to_train(file: RecipeFile, directory: Path) -> str:
    """Return lines about the end of a run; "" if the run may continue, or if its data must be opened to decide that.

    The settings are compared as on a resume. The data are not opened.

    Raises:
        InputError: a setting of the run has changed.
    """
    directory = directory.absolute()
    result = Result.read(directory)
    place = directory / CHECKPOINTS
    if result is None or [*steps_in(place)][-1:] != [result.step] or is_locked(directory):
        return ""
    try:
        saved = files.parse_json(files.read(directory / CONFIG_FILE))
        config = with_absolute_paths(file.config)
        fingerprints, precision = saved["fingerprint"], saved["train"]["precision"]
        is_from_file = "model" in saved
    # A start raises the error.
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not is_from_file or Integrity(place).check(result.step) is not None:
        return ""
    if config.train.precision is None:
        # The devices determine the precision, and they are not known without JAX.
        config = config.replace(train={"precision": precision})
    claimed = Claim(config.to_dict(), fingerprints, file)
    changed = Comparison(saved, claimed.record()).changed_keys()
    if not changed.isdisjoint(_OPENING_KEYS):
        return ""
    if not changed <= MAY_CHANGE:
        # The defaults of the choices are compared, too, which imports JAX.
        compare(directory, claimed)
    return _lines(directory, result)


def _lines(directory: Path, result: Result) -> str:
    """Return what a run reached, and how to go on."""
    reason = f" ({result.reason})" if result.status == "stopped" else ""
    when = f"{result.moment:%Y-%m-%d %H:%M}"
    measured = f"; result: {VAL} {format_metrics(result.validation)}" if result.validation else ""
    reached = f"{result.status} at step {result.step:,}{reason} on {when}: nothing to train{measured}{_best(directory)}"
    run = shlex.quote(str(directory))
    return (
        f"{directory}: {reached}\n"
        "to train longer, give more --epochs; to start anew, another --workdir; to measure the run again: "
        f"jaxddp eval {run}"
    )


def _best(directory: Path) -> str:
    """Return the best validation of the checkpoints as text; "" if it is unknown or the only one."""
    place = directory / CHECKPOINTS
    try:
        validations = ValidationFile(place, None)
    except InputError:
        return ""
    step, metric = validations.best(validations.steps), validations.goal.metric
    value = None if step is None else validations.of(step).get(metric)
    return "" if value is None else f"; best: {metric} {figure(metric, value)} at step {step:,}"
