"""The weights of a run as other libraries read them."""

from pathlib import Path

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import counted
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.recipe.make_recipe import model_of
from jaxddp.recipe.user_objects import objects_of_hooks
from jaxddp.weights.state_dict import write
from jaxddp.weights.torch_layout import namings_of, published
from jaxddp.workdir.saved_state import read_run, recipe_of_run

_ANY_CLASSES = 2
"""The names of a network's arrays are the same for any number of classes."""


def export_run(directory: Path, which: str, out: Path) -> str:
    """Write the weights of a run's checkpoint ("latest", "best" or a step) as .safetensors; returns what it did.

    Raises:
        InputError: there is no such checkpoint, the run's config does not say its network, or `out` cannot be written.
    """
    file = recipe_of_run(directory)
    if not file.has_network:
        raise InputError(
            f"{file.path}: the run came from Python and does not say its network; there, write its weights with "
            "jaxddp.export_weights(state, setup, FILE)"
        )
    step, arrays = read_run(directory, which, Topology.create(1))
    count = write_weights(out, model_of(file.config, _ANY_CLASSES, objects_of_hooks(file.hooks)), arrays)
    return f"{out}: {counted(count, 'array')} of step {step} of {directory}"


def write_weights(out: Path, model: Model, arrays: dict[str, np.ndarray], peers: Peers = ALONE) -> int:
    """Write arrays by path as the network's publisher names them, once for all processes; returns how many.

    Raises: InputError.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: the format is known by its name; give one that ends in .safetensors")
    named = published(arrays, namings_of(model)[0])
    # The processes of a job would write one file over another.
    if peers.is_first:
        write(out, named)
    return len(named)
