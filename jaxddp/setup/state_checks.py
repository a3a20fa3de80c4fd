"""Checks of a setup and a training state that a user passes to the Python API."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxddp.core.errors import InputError, refused
from jaxddp.engine.state import TrainState, first_difference
from jaxddp.setup.run_setup import RunSetup


def check_setup(setup: Any) -> None:
    """Raise `InputError` if `setup` is no `RunSetup`."""
    if not isinstance(setup, RunSetup):
        raise refused("setup", setup, "give what prepare_training returned")


def check_state(state: Any, setup: RunSetup) -> None:
    """Check that a state has the parameters and the model state of a setup's network.

    Raises:
        InputError: the object is no state, or an array differs. The message names the object or the first such array.
    """
    check_setup(setup)
    _check_arrays(state, setup, lambda state: {"params": state.params, "model_state": state.model_state})


def check_start(setup: RunSetup, *, resumes: bool = False) -> None:
    """Check that the state of a setup fits its model and optimizer, and that steps are left to train.

    Args:
        resumes: whether the run starts from a checkpoint instead of this state.

    Raises:
        InputError: the state does not fit, or the run would end before its first step.
    """
    _check_arrays(setup.state, setup, lambda state: state)
    done, plan = int(setup.state.step), setup.plan
    if not resumes and done >= plan.total_steps:
        length = setup.recipe.config.train.duration
        epochs = length.examples(num_examples=plan.num_examples, batch_size=plan.batch_size) / plan.num_examples
        more = round(plan.epoch(done)) + math.ceil(epochs)
        raise InputError(
            f"state: it is at step {done}, and epochs={float(epochs):g} end at step {plan.total_steps}; give more "
            f"epochs, such as epochs={more}"
        )


def _check_arrays(state: Any, setup: RunSetup, arrays_of: Callable[[TrainState], Any]) -> None:
    if not isinstance(state, TrainState):
        advice = "give a TrainState, which is the first value that train returns"
        raise refused("state", state, advice)
    if difference := first_difference(arrays_of(state), arrays_of(setup.like)):
        name, given, expected = difference
        raise InputError(
            f"state: {name} is {given}, and {expected} in this setup; give a state of its model and optimizer"
        )
    step, devices = state.step, set(setup.topology.mesh.devices.flat)
    if isinstance(step, jax.Array) and step.committed and step.sharding.device_set != devices:
        raise InputError(
            f"state: it is on {len(step.sharding.device_set)} devices, which are not the {len(devices)} of this setup; "
            "give setup.topology.replicate(jax.device_get(state))"
        )
