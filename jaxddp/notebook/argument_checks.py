"""Checks of the objects that are arguments of the Python API."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.choices import check_read
from jaxddp.config import Config, DataConfig
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, Key, Words, refused
from jaxddp.core.wording import first_line
from jaxddp.data.source import Source, check_source
from jaxddp.engine.state import TrainState
from jaxddp.hooks import check_parameters
from jaxddp.setup.configured_metrics import check_name
from jaxddp.setup.run_setup import RunSetup
from jaxddp.training.evaluation import Measure


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
