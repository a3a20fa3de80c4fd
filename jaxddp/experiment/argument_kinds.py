"""The arguments of the Python API that are objects: each is seen to be of its kind before anything is done with it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import DataConfig
from jaxddp.data.source import Source, check_source
from jaxddp.engine.state import TrainState, first_difference
from jaxddp.errors import InputError
from jaxddp.experiment.setup import RunSetup
from jaxddp.hooks import check_called
from jaxddp.recipe.metrics import check_name
from jaxddp.wording import first_line, refusal, show

Measure = Callable[[TrainState], Mapping[str, float]]


def check_data(data: Any) -> DataConfig | None:
    """The argument `data`. Raises: InputError; it is something else."""
    if data is not None and not isinstance(data, DataConfig):
        raise InputError(refusal("data", data, "give a jaxddp.DataConfig, such as DataConfig(image_size=64)"))
    if data is not None and data.labels_per_class is not None:
        advice = "from Python, give the table that jaxddp.data.unlabelled.few_labels makes"
        raise InputError(f"data.labels_per_class={data.labels_per_class}: {advice}")
    if data is not None and data.unlabelled is not None:
        raise InputError(f"data.unlabelled={show(data.unlabelled)}: from Python, give a table as unlabelled")
    if data is not None and data.verify == "manifest":
        raise InputError("data.verify=manifest: from Python, give the table that open_data(PATH, manifest=FILE) opens")
    return data


def check_function(function: Any, name: str, of: str, arguments: str = "") -> Any:
    """An argument that is a function `of` something, or None. Raises: InputError; it is something else, or cannot be
    called with these arguments, where they are given."""
    if function is not None and (isinstance(function, type) or not callable(function)):
        raise InputError(refusal(name, function, f"give a function of {of}"))
    if function is not None and arguments:
        check_called(function, name, _name(function), arguments)
    return function


def check_unlabelled(source: Any) -> Source | None:
    """The argument `unlabelled`, whose labels are not looked at, or None. Raises: InputError; it is something else."""
    if source is None:
        return None
    if not hasattr(check_source(source, "unlabelled"), "without_labels"):
        raise InputError(refusal("unlabelled", source, "it has no without_labels; see jaxddp.data.source.Source"))
    return source.without_labels()


def check_setup(setup: Any) -> None:
    """Raises `InputError` where `setup` comes from somewhere else."""
    if not isinstance(setup, RunSetup):
        raise InputError(refusal("setup", setup, "give what prepare_training returned"))


def check_schedule(schedule: Any) -> optax.Schedule | None:
    """A schedule that JAX can trace, or None. Raises: InputError; it fails, or returns something else than a number."""
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


def check_state(state: Any, setup: RunSetup) -> None:
    """See that a state can be measured by a setup: its parameters, and what its model keeps, are those of the network.

    Raises:
        InputError: names the first array that differs, or what was given instead.
    """
    check_setup(setup)
    _check_arrays(state, setup, lambda each: {"params": each.params, "model_state": each.model_state})


def check_start(setup: RunSetup, *, resumes: bool = False) -> None:
    """See that the state of a setup, which may be a trained one, is of its model and optimizer, and not at its end.

    Where the run resumes in a work directory, this is not the state that it begins with.

    Raises:
        InputError: it is another one, or the run would end before its first step.
    """
    _check_arrays(setup.state, setup, lambda each: each)
    done, plan = int(setup.state.step), setup.plan
    if not resumes and done >= plan.total_steps:
        length = setup.recipe.config.train.duration
        epochs = length.examples(num_examples=plan.num_examples, batch_size=plan.batch_size) / plan.num_examples
        more = round(plan.epoch(done)) + math.ceil(epochs)
        raise InputError(
            f"state: it is at step {done}, and epochs={float(epochs):g} end at step {plan.total_steps}; give more "
            f"epochs, such as epochs={more}"
        )


def check_evaluators(evaluators: Any, setup: RunSetup) -> list[Measure]:
    """Functions of the state whose metrics join each evaluation's; what they return is looked at when they are called.

    Raises:
        InputError: these are no functions, or nothing is evaluated; when called: it returned no dict of numbers.
    """
    if isinstance(evaluators, str) or not isinstance(evaluators, Sequence):
        raise InputError(refusal("evaluators", evaluators, "give a list of functions of the state"))
    for evaluator in evaluators:
        if check_function(evaluator, "evaluators", "the state", "state") is None:
            raise InputError("evaluators=[None]: give functions of the state")
    if evaluators and setup.validated is None:
        names = ", ".join(map(_name, evaluators))
        needed = "give val too" if setup.resources.val is None else "eval_every switches them off"
        raise InputError(f"evaluators=[{names}]: they are measured at evaluations; {needed}")
    return [_with_numbers(evaluator) for evaluator in evaluators]


def _with_numbers(evaluator: Measure) -> Measure:
    """The same function; what it returns is looked at."""

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
                raise InputError(refusal(f"{where} returned {name}", value, "return a number")) from None
        return numbers

    return measure


def _check_arrays(state: Any, setup: RunSetup, part: Callable[[TrainState], Any]) -> None:
    if not isinstance(state, TrainState):
        advice = "give a TrainState, the first of the two that train returns"
        raise InputError(refusal("state", state, advice))
    if differs := first_difference(part(state), part(setup.like)):
        name, found, here = differs
        raise InputError(f"state: {name} is {found}, and {here} in this setup; give a state of its model and optimizer")
    step, own = state.step, set(setup.topology.mesh.devices.flat)
    if isinstance(step, jax.Array) and step.committed and step.sharding.device_set != own:
        raise InputError(
            f"state: it lies on {len(step.sharding.device_set)} devices which are not the {len(own)} of this setup; "
            "give setup.topology.replicate(jax.device_get(state))"
        )


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
