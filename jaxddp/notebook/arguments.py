"""The arguments of the Python API: their checks, the config keys that they set, and their names in messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import Config, DataConfig
from jaxddp.config.choices import check_read
from jaxddp.config.registry import OBJECTIVES
from jaxddp.config.values import checked
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, JaxddpError, Key, Words, refused
from jaxddp.core.ranges import Range
from jaxddp.core.user_code import describing_errors
from jaxddp.core.wording import choices, first_line, show
from jaxddp.data.source import Source, check_source
from jaxddp.engine.self_test import Mode
from jaxddp.engine.state import TrainState
from jaxddp.recipe.hooks import check_parameters
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.user_objects import check_name
from jaxddp.training.evaluation import Measure

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


def check_data(data: Any) -> DataConfig | None:
    """Check the argument `data` and return it. Raises: InputError."""
    if data is None:
        return None
    if not isinstance(data, DataConfig):
        raise refused("data", data, "give a jaxddp.DataConfig, such as DataConfig(image_size=64)")
    if data.labels_per_class is not None:
        advice = ": from Python, give the table that jaxddp.data.selection.few_labels makes"
        raise InputError(Key("data.labels_per_class", data.labels_per_class), advice)
    if data.unlabelled is not None:
        raise InputError(Key("data.unlabelled", data.unlabelled), ": from Python, give a table as unlabelled")
    for key in ("limit", "classes", "val_share"):
        if (value := getattr(data, key)) is not None:
            advice = "open_data has arguments for classes and val_share, and table.take(N) returns fewer examples"
            raise InputError(Key(f"data.{key}", value), ": from Python, the table is used as it is", advice=advice)
    if data.verify == "manifest":
        raise InputError(
            Key.plain("data.verify", "manifest"),
            ": from Python, give the table that open_data(PATH, manifest=FILE) opens",
        )
    check_read(Config(data=data))
    return data


def check_function(function: Any, name: str, of: str, arguments: str = "") -> Any:
    """Check an argument that is a function or None, and return it.

    Args:
        name: the name of the argument.
        of: the description of the function's arguments in a message.
        arguments: the names of its positional arguments; empty to skip this check.

    Raises: InputError if the argument is not a function, or takes other arguments.
    """
    if function is not None and (isinstance(function, type) or not callable(function)):
        raise refused(name, function, f"give a function of {of}")
    if function is not None and arguments:
        check_parameters(function, name, _name(function), arguments)
    return function


def check_unlabelled(source: Any) -> Source | None:
    """Check the argument `unlabelled`, and return it without its labels; None stays None. Raises: InputError."""
    if source is None:
        return None
    if not hasattr(check_source(source, "unlabelled"), "without_labels"):
        raise refused("unlabelled", source, "it has no without_labels; see jaxddp.data.source.Table")
    return source.without_labels()


def check_schedule(schedule: Any) -> optax.Schedule | None:
    """Check that JAX can trace a schedule, and return it. Raises: InputError if it fails or returns no number."""
    if check_function(schedule, "schedule", "the step, such as optax.cosine_decay_schedule(1.0, steps)") is None:
        return None
    try:
        found = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        reason = first_line(error)
        raise InputError(
            f"schedule: fails for a step int32[] ({type(error).__name__}: {reason}); give a function that JAX can trace"
        ) from error
    if getattr(found, "shape", None) != () or not jnp.issubdtype(found.dtype, jnp.number):
        kind = (
            f"{found.dtype}{list(found.shape)}"
            if hasattr(found, "dtype")
            else f"an object of type {type(found).__name__}"
        )
        raise InputError(f"schedule: returned {kind} for a step; return one number")
    return schedule


def check_evaluators(evaluators: Any, setup: RunSetup) -> list[Measure]:
    """Check functions of the state that return metrics, and return functions that also check their results.

    Raises:
        InputError: an object is no function, or validation is disabled. The returned functions raise it if a result is
            not a dict of numbers.
    """
    if isinstance(evaluators, str) or not isinstance(evaluators, Sequence):
        raise refused("evaluators", evaluators, "give a list of functions of the state")
    for evaluator in evaluators:
        if check_function(evaluator, "evaluators", "the state", "state") is None:
            raise InputError("evaluators=[None]: give functions of the state")
    if evaluators and setup.validated is None:
        names = ", ".join(map(_name, evaluators))
        needed = "give val too" if setup.resources.val is None else "eval_every disables evaluation"
        raise InputError(f"evaluators=[{names}]: they are measured at evaluations; {needed}")
    return [_with_numbers(evaluator) for evaluator in evaluators]


def _with_numbers(evaluator: Measure) -> Measure:
    """Return a function that calls `evaluator` and checks its result."""

    def measure(state: TrainState) -> dict[str, float]:
        found, where = evaluator(state), f"evaluators: {_name(evaluator)}"
        if not isinstance(found, Mapping):
            raise InputError(f"{where} returned an object of type {type(found).__name__}; return a dict of numbers")
        numbers = {}
        for name, value in found.items():
            check_name(name, where)
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                raise refused(f"{where} returned {name}", value, "return a number") from None
        return numbers

    return measure


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def check_length(before: Config, after: Config) -> None:
    """Raise `InputError` if a key depends on the length of a run and the length was changed."""
    if before.train.duration == after.train.duration:
        return
    changed = f"but the length is now {after.train.duration}"
    if before.train.lookahead is not None:
        raise InputError(
            Key("train.lookahead"),
            f": the setup was prepared for a run of {before.train.duration}, whose last step takes over "
            f"the slow weights, {changed}",
            advice="give the new length to prepare_training",
        )
    unfreeze_times = before.model.unfreeze_times.items()
    shares: list[tuple[Words, Duration]] = [
        ((Key("model.unfreeze"), f": {layer}="), each) for layer, each in unfreeze_times
    ]
    if before.data.grow_from is not None:
        shares += [((Key(f"data.{key}"), "="), getattr(before.data, key)) for key in ("grow_start", "grow_end")]
    for key, duration in shares:
        if duration.unit == "%":
            raise InputError(
                key,
                f"{duration} is a fraction of a run of {before.train.duration}, {changed}",
                advice="give the new length to prepare_training, or use epochs or steps",
            )
