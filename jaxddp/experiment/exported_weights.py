"""The weights of a run as other libraries read them."""

from pathlib import Path

import numpy as np

import jaxddp.files as files
from jaxddp.engine.shapes import by_path
from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError
from jaxddp.experiment.argument_kinds import check_state
from jaxddp.experiment.arguments import words_of_arguments
from jaxddp.experiment.initial_weights import read_run
from jaxddp.experiment.saved_state import recipe_of_run
from jaxddp.experiment.setup import RunSetup
from jaxddp.job.membership import is_first
from jaxddp.mesh import Topology
from jaxddp.models.protocol import Model
from jaxddp.recipe.given import by_hooks
from jaxddp.recipe.make import model_of
from jaxddp.weights.layout import namings_of, published
from jaxddp.weights.state_dict import write
from jaxddp.wording import counted

_ANY_CLASSES = 2
"""The names of a network's arrays are the same for any number of classes."""


def export_run(directory: Path, which: str, out: Path) -> str:
    """Write the weights of a run's checkpoint ("latest", "best" or a step) as .safetensors; returns what it did.

    Raises:
        InputError: there is no such checkpoint, the run's config does not say its network, or `out` cannot be written.
    """
    file = recipe_of_run(directory)
    if not file.says_network:
        raise InputError(
            f"{file.path}: the run came from Python and does not say its network; there, write its weights with "
            "jaxddp.export_weights(state, setup, FILE)"
        )
    step, arrays = read_run(directory, which, Topology.create(1))
    count = _write(out, model_of(file.config, _ANY_CLASSES, by_hooks(file.hooks)), arrays)
    return f"{out}: {counted(count, 'array')} of step {step} of {directory}"


@words_of_arguments()
def export_weights(state: TrainState, setup: RunSetup, out: str | Path) -> None:
    """Write the weights that evaluation measures as a .safetensors file.

    A network that torchvision or timm published has their names and layout, and any other its own paths with dots.
    `prepare_training(..., weights=out)` starts from them. Raises: InputError; an argument is of another kind,
    or the file cannot be written.
    """
    check_state(state, setup)
    files.check_path(out, "out")
    arrays = by_path(state.eval_params, state.model_state)
    _write(Path(out), setup.recipe.model, {path: np.asarray(leaf) for path, leaf in arrays.items()})


def _write(out: Path, model: Model, arrays: dict[str, np.ndarray]) -> int:
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: the format is known by its name; give one that ends in .safetensors")
    named = published(arrays, namings_of(model)[0])
    # The processes of a job would write one file over another.
    if is_first():
        write(out, named)
    return len(named)
