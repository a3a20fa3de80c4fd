"""The arguments of the Python API: their checks, the config that they make, and their names in errors."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import CheckpointConfig, Config, DataConfig, ObjectiveConfig, ParallelConfig, TrainConfig
from jaxddp.config.data_section import TABLE_KEYS
from jaxddp.config.registry import OBJECTIVES, check_read
from jaxddp.config.values import Names, checked, similar_keys
from jaxddp.core.errors import InputError, JaxddpError, Key, choices, first_line, kind_of, refused, shaped
from jaxddp.core.ranges import Range
from jaxddp.core.user_code import describing_errors
from jaxddp.data.source import Source, check_source, labels_of
from jaxddp.engine.state import TrainState
from jaxddp.mesh import without_mesh
from jaxddp.setup.network_checks import check_head
from jaxddp.setup.run_setup import RunSetup, check_state
from jaxddp.setup.user_objects import UserObject, check_name
from jaxddp.training.evaluation import Measure

_Epochs = Annotated[float, Range(0, 10**9, above=True)]


def _keys(section: type, *left_out: str) -> list[str]:
    return [each.name for each in dataclasses.fields(section) if each.name not in left_out]


_LORA = ["lora", "lora_alpha", "lora_layers"]
_BY_SECTION = {
    "model": ["cpu_convolutions", "freeze", "new_layers", "offline", "unfreeze", "weights", *_LORA],
    "optimizer": ["clip_norm", "groups", "layer_decay", "rate_factors"],
    "train": _keys(TrainConfig, "batch_size", "duration", "label_smoothing"),
    "checkpoint": _keys(CheckpointConfig, "every"),
    "parallel": _keys(ParallelConfig, "devices", "cpu_devices", "groups", "check_replicas", "self_test"),
    "log": ["gradient_norm"],
    "objective": _keys(ObjectiveConfig, "name"),
}
OPTIONS = {name: f"{section}.{name}" for section, names in _BY_SECTION.items() for name in names}
"""The key of each option of `prepare_training`. `groups` is an option of the optimizer."""
OPTIONS["device_groups"] = "parallel.groups"

_NAMES = {key: option for option, key in OPTIONS.items()}
_NAMES |= {"log.every": "log_every", "eval.every": "eval_every", "checkpoint.every": "save_every"}
_NAMES |= {"parallel.devices": "devices", "parallel.check_replicas": "check_every", "parallel.self_test": "self_test"}
_NAMES |= {f"log.{key}": f"log_{key}" for key in ("to", "project", "name", "config")}
_NAMES |= {"model.name": "model", "model.batch_norm": "batch_norm", "model.weight_init": "weight_init"}
_NAMES |= dict.fromkeys(("train.batch_size", "eval.batch_size"), "batch_size_per_device")
_NAMES |= {"train.duration": "epochs", "log.profile": "profile", "objective.name": "objective", "workdir": "workdir"}
_NAMES |= {"data.unlabelled": "unlabelled", "fingerprint.unlabelled": "unlabelled.fingerprint"}
_NAMES |= {"fingerprint.train": "table.fingerprint", "the config": "the model and optimizer"}
"""The argument of each key of a config."""


def config_of_options(
    options: Mapping[str, Any], objective: Any, seed: int, others: Iterable[str] = (), of_train: Iterable[str] = ()
) -> Config:
    """Return the config of the options of `prepare_training`.

    Args:
        objective: a name or a function.
        others: names of its other arguments, for suggestions if an option is unknown; `of_train`: those of `train`.

    Raises: InputError if an option is unknown, or has no effect.
    """
    for name in options.keys() - OPTIONS:
        meant = next((_NAMES[key] for key in similar_keys(name, _NAMES)), name)
        known = choices(meant, {*OPTIONS, *others})
        if name in ("class_weights", "label_smoothing"):
            known = f"the loss of train has it: jaxddp.losses.cross_entropy({name}=…)"
        elif of_its := {name, meant} & {*of_train} - {*others}:
            known = f"it is an argument of train: train(…, {min(of_its)}=…)"
        raise InputError(f"prepare_training: unknown option {name!r}; {known}")
    values = {OPTIONS[name]: value for name, value in options.items()}
    if isinstance(shares := options.get("shares"), tuple | list):
        values["parallel.shares"] = ",".join(map(str, shares))
    if isinstance(objective, str):
        values["objective.name"] = objective
    # `unlabelled_ratio` is allowed, because it sets the size of the unlabelled batches of any objective.
    elif of_name := [key for key in values if key.startswith("objective.") and key != "objective.unlabelled_ratio"]:
        advice = "pass the value to the function instead"
        raise InputError(Key(of_name[0], values[of_name[0]]), ": the objective is a function", advice=advice)
    config = Config().replace(seed=seed, **values)
    check_read(config, () if isinstance(objective, str) else (OBJECTIVES.hook,))
    return config


def log_settings(
    workdir: Any, profile: Any, log_to: str | Sequence[str], project: str | None, name: str | None, config: Any
) -> dict[str, Any]:
    """Return the values of the config section `log` for the arguments of loggers; `config` is a dict or None.

    Raises: InputError if a value is invalid, or a work directory is needed and there is none.
    """
    if workdir is None and (profile or log_to):
        loggers = (Key("log_to", log_to), ": the output of loggers")
        written = (Key("profile", profile), ": a trace") if profile else loggers
        raise InputError(written, " is written into the work directory", advice="give workdir too")
    words = tuple(f"{key}={value}" for key, value in checked(config or {}, dict, "log_config").items())
    settings = {"to": ("jsonl", *checked(log_to, Names, "log_to")), "project": project, "name": name, "config": words}
    check_read(Config().replace(log=settings))
    return settings | {"profile": profile}


@contextmanager
def errors_name_arguments(names: Mapping[str, str] = _NAMES) -> Iterator[None]:
    """Rename keys and options in the errors of the block to the arguments in `names`: `accumulate=4`.

    A batch size becomes "a global batch of 256", because the argument of `prepare_training` is the batch size of one
    device. Errors in the user's code get a line with file, line and function; see
    `jaxddp.core.user_code.describing_errors`.
    """

    def as_argument(key: Key) -> str:
        # Keys of config.json that identify objects from arguments begin with "objects.".
        name = key.name.partition("objects.")[2] or names.get(key.name)
        if name is None:
            return str(key)
        if key.has_value and name == "batch_size_per_device":
            return f"a global batch of {key.shown_value}"
        return f"{name}={key.shown_value}" if key.has_value else name

    try:
        with describing_errors(), without_mesh():
            yield
    except JaxddpError as error:
        error.rename_keys(as_argument)
        raise


_TABLE = (
    "the table is used as it is; open_data has arguments for classes, val_share and fold, and table.take(N) returns"
)
_FROM_PYTHON = {
    **dict.fromkeys(("limit", "classes", "val_share", "fold"), f"{_TABLE} fewer examples"),
    "labels_per_class": "give the table that jaxddp.data.opening.few_labels makes",
    "unlabelled": "give a table as unlabelled",
    "verify": "give the table that open_data(PATH, manifest=FILE) opens",
}
"""What to give instead of a key of `data` that a table decides, by the key."""


def check_data(data: Any, *, opens: bool = False) -> DataConfig | None:
    """Check the argument `data`, which may say how a table is read if it `opens` one; return it. Raises: InputError."""
    if data is None:
        return None
    if not isinstance(data, DataConfig):
        raise refused("data", data, "give a jaxddp.DataConfig, such as DataConfig(image_size=64)")
    of_table = {} if opens else dict.fromkeys(TABLE_KEYS, "the table is used as it is; give this to open_data")
    for key, advice in (_FROM_PYTHON | of_table).items():
        if (value := getattr(data, key)) not in (None, "first", "never", ()):
            raise InputError(Key(f"data.{key}", value), f": from Python, {advice}")
    check_read(Config(data=data))
    return data


def check_unlabelled(source: Any) -> Source | None:
    """Check the argument `unlabelled`, and return it without its labels; None stays None. Raises: InputError."""
    if source is None:
        return None
    if not hasattr(check_source(source, "unlabelled"), "without_labels"):
        raise refused("unlabelled", source, "it has no without_labels; see jaxddp.data.source.Table")
    return source.without_labels()


def check_schedule(schedule: Any) -> optax.Schedule | None:
    """Check that JAX can trace a schedule, and return it. Raises: InputError if it fails or returns no number."""
    if schedule is None:
        return None
    description = "the step, such as optax.cosine_decay_schedule(1.0, steps)"
    function = UserObject(schedule, "schedule").function(description, "step")
    try:
        found = jax.eval_shape(lambda step: jnp.asarray(function(step)), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        reason = f"fails for a step int32[] ({type(error).__name__}: {first_line(error)})"
        raise InputError(f"schedule: {reason}; give a function that JAX can trace, with jnp.where for if") from error
    if found.shape:
        raise InputError(f"schedule: returned {shaped(found)} for a step; return one number")
    return schedule


def check_evaluators(evaluators: Any, setup: RunSetup) -> list[Measure]:
    """Check functions of the state that return metrics, and return functions that also check their results.

    Raises:
        InputError: an object is no function, or validation is disabled. The returned functions raise it if a result is
            not a dict of numbers.
    """
    if isinstance(evaluators, str) or not isinstance(evaluators, Sequence):
        raise refused("evaluators", evaluators, "give a list of functions of the state")
    functions = [UserObject(each, "evaluators").function("the state", "state") for each in evaluators]
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    if functions and setup.validated is None:
        needed = "give val too" if setup.resources.val is None else "eval_every disables evaluation"
        raise InputError(f"evaluators=[{', '.join(names)}]: they are measured at evaluations; {needed}")
    return [functools.partial(_numbers, function, name) for function, name in zip(functions, names, strict=True)]


def _numbers(evaluator: Measure, name: str, state: TrainState) -> dict[str, float]:
    """Return the result of an evaluator. Raises: InputError if it is not a dict of numbers."""
    where, numbers, found = f"evaluators: {name}", dict[str, float](), evaluator(state)
    if not isinstance(found, Mapping):
        raise InputError(f"{where} returned {kind_of(found)}; return a dict of numbers")
    for metric, value in found.items():
        check_name(metric, where)
        try:
            numbers[metric] = float(value)
        except (TypeError, ValueError):
            raise refused(f"{where} returned {metric}", value, "return a number") from None
    return numbers


def length_of(epochs: Any) -> str:
    """Return the argument `epochs`, a number or a duration such as "100 steps", as text. Raises: InputError."""
    return epochs if isinstance(epochs, str) else f"{checked(epochs, _Epochs, 'epochs')} epochs"


def check_length(before: Config, after: Config) -> None:
    """Raise `InputError` if a key depends on the length of a run and the length was changed."""
    if before.train.duration == after.train.duration:
        return
    changed = f"a run of {before.train.duration}, but the length is now {after.train.duration}"
    advice = "give the new length to prepare_training"
    for key in ("lookahead", "swa"):
        if getattr(before.train, key) is not None:
            raise InputError(Key(f"train.{key}"), f": it depends on the last step of {changed}", advice=advice)
    times = [("model.unfreeze", time) for time in before.model.unfreeze_times.values()]
    if before.data.grow_from is not None:
        times += [("data.grow_start", before.data.grow_start), ("data.grow_end", before.data.grow_end)]
    for key, duration in times:
        if duration.unit == "%":
            share = f": {duration} is a fraction of {changed}"
            raise InputError(Key(key), share, advice=f"{advice}, or use epochs or steps")


def check_evaluation(state: TrainState, setup: RunSetup, table: Source, *, one_label: bool = False) -> None:
    """Check that a state can be measured on a table, whose images have `one_label`. Raises: InputError."""
    check_state(state, setup)
    check_source(table, "table")
    if one_label:
        if (form := labels_of(table).form) != "one label":
            problem = f"table: its images have {form}, and this function takes one label"
            raise InputError(problem, advice="use the metrics of evaluate")
        check_head(setup.config, "setup")
