"""The arguments of the Python API: the config keys that they set, and their names in messages about these keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from jaxddp.choices import check_read
from jaxddp.config import Config
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, JaxddpError, Key
from jaxddp.core.ranges import Range
from jaxddp.core.user_code import describing_errors
from jaxddp.core.wording import choices, show
from jaxddp.engine.self_test import Mode
from jaxddp.overrides import checked
from jaxddp.registry import OBJECTIVES

Epochs = Annotated[float, Range(0, 10**9, above=True)]

_OPTIONS = {
    "model": ("cpu_convolutions", "freeze", "new_layers", "offline", "unfreeze", "weights"),
    "optimizer": ("clip_norm", "groups", "layer_decay", "rate_factors"),
    "train": (
        *("accumulate", "gradient_precision", "max_bad_steps", "precision", "ema", "ema_warmup", "ema_every"),
        *("lookahead", "lookahead_decay", "stop_after", "stop_min_gain"),
        *("sync_every", "outer_optimizer", "outer_rate", "outer_momentum"),
    ),
    "checkpoint": ("best", "best_is", "best_smoothing"),
    "parallel": (
        *("buckets", "device_groups", "reproducible", "shard_optimizer", "shares", "xla_options"),
        *("start_timeout", "heartbeat_timeout", "stall_timeout", "shutdown_timeout"),
    ),
    "log": ("gradient_norm",),
    "objective": (
        *("consistency_weight", "strong_cutout", "strong_rand_augment", "strong_rand_magnitude", "threshold"),
        *("teacher", "teacher_share", "temperature", "unlabelled_ratio", "unlabelled_weight"),
    ),
}
"""The keys of a config that `prepare_training` accepts, by section."""

_KEYS = {"device_groups": "groups"}
"""The key of each option with another name, because `groups` is an option of the optimizer."""


def _key_of(option: str) -> str:
    return _KEYS.get(option, option)


_CADENCES = {
    "log_every": ("log.every", Duration),
    "profile": ("log.profile", Duration | None),
    "save_every": ("checkpoint.every", Duration),
    "eval_every": ("eval.every", Duration),
    "check_every": ("parallel.check_replicas", Duration),
    "self_test": ("parallel.self_test", Mode),
}
"""The arguments of `train` that set a key. Each has the key and the type of its value."""

_NAMES = {
    **{f"{section}.{_key_of(key)}": key for section, keys in _OPTIONS.items() for key in keys},
    **{key: argument for argument, (key, _) in _CADENCES.items()},
    "train.duration": "epochs",
    "train.batch_size": "batch_size_per_device",
    "eval.batch_size": "batch_size_per_device",
    "parallel.devices": "devices",
    "model.batch_norm": "batch_norm",
    "model.weight_init": "weight_init",
    "model.name": "model",
    "objective.name": "objective",
    **{f"log.{key}": f"log_{key}" for key in ("to", "project", "name", "config")},
    "data.unlabelled": "unlabelled",
    "fingerprint.train": "table.fingerprint",
    "fingerprint.unlabelled": "unlabelled.fingerprint",
    "workdir": "workdir",
    "the config": "the model and optimizer",
}
"""The argument of each key of a config."""

_OBJECTS = "objects."
"""Prefix of the keys of config.json that identify objects from arguments."""


def options_of(section: str) -> tuple[str, ...]:
    """Return the keys of a section that `prepare_training` accepts."""
    return _OPTIONS[section]


def config_of_options(options: Mapping[str, Any], objective: Any, seed: int, other_names: Iterable[str] = ()) -> Config:
    """Return the config of the options of `prepare_training`.

    Args:
        objective: a name or a function.
        other_names: names of the other arguments, for suggestions if an option is unknown.

    Raises:
        InputError: an option is unknown, or has no effect.
    """
    section_of = {key: section for section, keys in _OPTIONS.items() for key in keys}
    for key in options.keys() - section_of:
        raise InputError(f"prepare_training: unknown option {key!r}; {choices(key, {*section_of, *other_names})}")
    given = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    # These values may be text, as on the command line: "conv1=0.1,fc=10".
    given |= {key: (given[key],) for key in ("unfreeze", "rate_factors", "groups") if isinstance(given.get(key), str)}
    if isinstance(given.get("shares"), tuple | list):
        given["shares"] = ",".join(map(str, given["shares"]))
    changes = {
        section: {_key_of(key): given[key] for key in keys if key in given} for section, keys in _OPTIONS.items()
    }
    if isinstance(objective, str):
        changes["objective"]["name"] = objective
    else:
        # `unlabelled_ratio` is allowed, because it sets the size of the unlabelled batches of any objective.
        for key in changes["objective"].keys() - {"unlabelled_ratio"}:
            advice = "pass the value to the function instead"
            raise InputError(Key(key, given[key]), ": the objective is a function", advice=advice)
    config = Config().replace(seed=seed, **changes)
    check_read(config, () if isinstance(objective, str) else (OBJECTIVES.hook,))
    return config


def changes_of_cadences(**given: Any) -> dict[str, dict[str, Any]]:
    """Return the config changes for the cadence arguments of `train`. Raises: InputError if an argument is invalid."""
    changes: dict[str, dict[str, Any]] = {}
    for argument, (name, kind) in _CADENCES.items():
        section, _, key = name.partition(".")
        changes.setdefault(section, {})[key] = checked(given[argument], kind, argument)
    return changes


def log_settings(
    log_to: str | Sequence[str], project: str | None, name: str | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the values of the config section `log` for the arguments of loggers. Raises: InputError."""
    names = checked((log_to,) if isinstance(log_to, str) else log_to, tuple[str, ...], "log_to")
    words = []
    for key, value in checked({} if config is None else config, dict, "log_config").items():
        word = f"{key}={value}"
        if not isinstance(value, str | int | float) or not str(key) or "," in word or "=" in str(key):
            raise InputError(
                Key("log_config"), f": {show(word)}: give a dict of names to texts or numbers, without commas"
            )
        words.append(word)
    settings = {"to": ("jsonl", *names), "project": project, "name": name, "config": tuple(words)}
    Config().replace(log=settings).log.check()
    return settings


def check_workdir_for(workdir: Any, profile: Any, log_to: Any) -> None:
    """Raise `InputError` if an argument needs a work directory and there is none."""
    if workdir is None and (profile or log_to):
        file = (Key("profile", profile), ": a trace") if profile else (Key("log_to", log_to), ": the output of loggers")
        raise InputError(file, " is written into the work directory", advice="give workdir too")


@contextmanager
def errors_name_arguments(names: Mapping[str, str] = _NAMES) -> Iterator[None]:
    """Rename keys and options in the errors of the block to the arguments in `names`.

    Errors in the user's code get a line with file, line and function; see `jaxddp.core.user_code.describing_errors`.
    """
    try:
        with describing_errors():
            yield
    except JaxddpError as error:
        error.rename_keys(lambda key: as_argument(key, names))
        raise


def as_argument(key: Key, names: Mapping[str, str] = _NAMES) -> str:
    """Return the argument of a key: `train.accumulate=4` becomes `accumulate=4`.

    A batch size becomes "a global batch of 256", because the argument of `prepare_training` is the batch
    size of one device.
    """
    argument = key.name.removeprefix(_OBJECTS)
    name = argument if argument != key.name else names.get(key.name)
    if name is None:
        return str(key)
    if key.has_value and key.name.endswith(".batch_size"):
        return f"a global batch of {key.shown_value}"
    return f"{name}={key.shown_value}" if key.has_value else name
