"""Exports the weights of a run with the names that other libraries use."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import counted
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.setup.recipe import model_of
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.weights.state_dict import write
from jaxddp.weights.torch_layout import constants_of, namings_of, published
from jaxddp.workdir.saved_state import read_run, recipe_of_run

_ANY_CLASSES = 2
"""An arbitrary number of classes. The names of a network's arrays do not depend on it."""


@dataclass(frozen=True)
class RunWeights:
    """The weights of a checkpoint of a run.

    Attributes:
        step: the step of the checkpoint.
        model: the network, with an arbitrary number of classes.
        arrays: the arrays by path, such as "params/conv1/kernel".
    """

    step: int
    model: Model
    arrays: dict[str, np.ndarray]


def weights_of_run(directory: Path, which: str) -> RunWeights:
    """Return the weights of a checkpoint ("latest", "best" or a step).

    Raises:
        InputError: there is no such checkpoint, or the run's config does not name its network.
    """
    file = recipe_of_run(directory)
    if not file.has_network:
        raise InputError(
            f"{file.path}: the run came from Python and its config does not name the network; write its "
            "weights in Python with jaxddp.export_weights(state, setup, FILE)"
        )
    step, arrays = read_run(directory, which, Topology.create(1))
    return RunWeights(step, model_of(file.config, _ANY_CLASSES, objects_of_hooks(file.hooks)), arrays)


def export_run(directory: Path, which: str, out: Path) -> str:
    """Write the weights of a checkpoint as .safetensors, and return a summary line.

    Raises: see `weights_of_run` and `write_weights`.
    """
    weights = weights_of_run(directory, which)
    count = write_weights(out, weights.model, weights.arrays)
    return f"{out}: {counted(count, 'array')} of step {weights.step} of {directory}"


def write_weights(out: Path, model: Model, arrays: dict[str, np.ndarray], peers: Peers = ALONE) -> int:
    """Write arrays under their published names, and return their number. Only the first process writes.

    Args:
        arrays: the arrays of the network by path, such as "params/conv1/kernel".

    Raises:
        InputError: the file cannot be written, or its name does not end in .safetensors.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: its name must end in .safetensors")
    named = published(arrays, namings_of(model)[0]) | constants_of(model)
    # If all processes of a job wrote, they would overwrite each other's file.
    if peers.is_first:
        write(out, named)
    return len(named)
