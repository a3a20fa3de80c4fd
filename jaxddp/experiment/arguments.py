"""The arguments of the Python API as sections of a config."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jaxddp.duration import Duration
from jaxddp.engine.self_test import Mode
from jaxddp.errors import InputError
from jaxddp.overrides import checked
from jaxddp.ranges import Range
from jaxddp.wording import choices

Epochs = Annotated[float, Range(0, 10**9, above=True)]

_OPTIONS = {
    "model": ("freeze", "new_layers", "unfreeze", "weights"),
    "optimizer": ("layer_decay", "rate_factors"),
    "train": ("accumulate", "gradient_precision", "max_bad_steps", "precision"),
    "parallel": ("buckets", "reproducible", "xla_options"),
}
"""What `prepare_training` takes of a config, by its section."""


def sections(options: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options as changes of a config, beside those of its `train`. Raises: InputError; one is unknown."""
    section_of = {key: section for section, keys in _OPTIONS.items() for key in keys}
    for key in options.keys() - section_of:
        raise InputError(f"prepare_training: unknown option {key!r}; {choices(key, section_of)}")
    given = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    # As at the terminal: "conv1=0.1,fc=10".
    given |= {key: (given[key],) for key in ("unfreeze", "rate_factors") if isinstance(given.get(key), str)}
    changes = {section: {key: given[key] for key in keys if key in given} for section, keys in _OPTIONS.items()}
    return changes | {"train": {**changes["train"], **train}}


def cadences(
    log_every: str, save_every: str, eval_every: str, check_every: str, profile: str | None, self_test: str
) -> dict[str, dict[str, Any]]:
    """What `train` is told of when and how, as the sections of a config. Raises: InputError; names the argument."""
    return {
        "log": {
            "every": checked(log_every, Duration, "log_every"),
            "profile": checked(profile, Duration | None, "profile"),
        },
        "checkpoint": {"every": checked(save_every, Duration, "save_every")},
        "eval": {"every": checked(eval_every, Duration, "eval_every")},
        "parallel": {
            "check_replicas": checked(check_every, Duration, "check_every"),
            "self_test": checked(self_test, Mode, "self_test"),
        },
    }


def loggers(log_to: str | Sequence[str]) -> tuple[str, ...]:
    """The names of `log_to` and metrics.jsonl, as a config's `log.to`. Raises: InputError; it is something else."""
    given = (log_to,) if isinstance(log_to, str) else log_to
    return ("jsonl", *checked(given, tuple[str, ...], "log_to"))


def check_written(workdir: Any, profile: str | None, log_to: str | Sequence[str]) -> None:
    """Raises `InputError` where there is no work directory for what is to be written there."""
    if workdir is None and (profile or log_to):
        what = f"profile={profile!r}: a trace is" if profile else f"log_to={log_to!r}: what loggers keep is"
        raise InputError(f"{what} written into the work directory; give workdir too")
