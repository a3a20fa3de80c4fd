"""Reads the recipe of a run, and the state of a checkpoint of any architecture."""

from pathlib import Path

import jax
import numpy as np

import jaxddp.core.files as files
from jaxddp.config.layers import ADAPTERS
from jaxddp.core.errors import InputError
from jaxddp.engine.state import TrainState, merged_state
from jaxddp.mesh import Topology
from jaxddp.models.adapt import merged
from jaxddp.models.interface import own_arrays
from jaxddp.recipe.file import RecipeFile, read_config, read_recipe
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.weights.state_dict import FORMS

_ADVICE = "give a run's work directory"


def recipe_of_run(directory: Path) -> RecipeFile:
    """Return the recipe of a run. Raises: InputError if there is no such run, or its copy of the recipe has changed."""
    path = directory / CONFIG_FILE
    files.content_of(path, _ADVICE, missing=f"no such file; {_ADVICE}")
    return read_recipe(path)


def restore_state(directory: Path, which: str, topology: Topology, advice: str = _ADVICE) -> TrainState:
    """Return the state of a checkpoint (see `agreed_step`) on every device, with plain dicts as trees.

    If the checkpoint has several states (see `TrainState.stacked`), their average is returned. Adapters of `model.lora`
    are merged with their kernels. Raises: InputError if there is no such checkpoint, or it is damaged.
    """
    place = directory / CHECKPOINTS
    if not place.is_dir():
        raise InputError(f"{directory}: not the work directory of a run: it has no folder {CHECKPOINTS}/; {advice}")
    with Checkpoints(place, topology.peers, read_only=True) as checkpoints:
        state = checkpoints.restore_as_saved(agreed_step(checkpoints, which), topology.replicated)
        state = merged_state(state, topology.replicated)
    if not (isinstance(state.params, dict) and ADAPTERS in state.params):
        return state
    _, content = read_config(directory / CONFIG_FILE)
    # A run from Python has these keys among its objects.
    keys = content.get("model", {}) | content.get("objects", {})
    scale = float(keys["lora_alpha"]) / int(keys["lora"])
    return state.map_params(jax.jit(lambda params: merged(params, scale), out_shardings=topology.replicated))


def read_run(directory: Path, which: str, topology: Topology) -> tuple[int, dict[str, np.ndarray]]:
    """Return the step of a run's checkpoint, and the arrays for evaluation by path; see `restore_state`."""
    state = restore_state(directory, which, topology, f"give {FORMS}")
    arrays = own_arrays(state.eval_params, state.eval_model_state)
    return int(state.step), {path: np.asarray(leaf) for path, leaf in arrays.items()}


def agreed_step(checkpoints: Checkpoints, which: str) -> int:
    """Return the step of a checkpoint ("latest", "best" or a number). Process 0 verifies it for all processes.

    "best" means the latest checkpoint if the run was never validated. Raises: InputError if there is no such
    checkpoint, or it is damaged.
    """

    def verified() -> int:
        step = checkpoints.step("latest" if which == "best" and checkpoints.best() is None else which)
        checkpoints.verify(step)
        return step

    return checkpoints.peers.from_first("checkpoint", verified)
